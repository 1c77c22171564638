"""LLaMA-Factory and ms-swift from their own command lines: SFT and DPO at ZeRO-2 on two CPU ranks,
resumed.

Each is in an environment of its own (`make integrations-more`), as they want other versions of what
they share.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.ranks import ROOT, free_port

pytestmark = pytest.mark.distributed
HERE = Path(sys.executable).parent
PARAMS = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "kfac": {"factor": {"update_interval": 2}, "burn_in": {"steps": 0}},
}
# DeepSpeed's op for CPU ranks is compiled for minutes, and in 0.18.9 gloo gathers lists alone
# (docs/notes/versions.md); the line of ds_kfac.pth, as an installation would have it
SITE = """
import sys
{pth}
class Quick:
    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed.runtime.engine":
            return None
        sys.modules["deepspeed.ops"].__compatible_ops__["deepspeed_shm_comm"] = False
        sys.modules["deepspeed.comm"].has_all_gather_into_tensor = lambda: False
sys.meta_path.insert(0, Quick())
"""
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model, sums as data of both tools' forms, and configs."""
    if not any(map(importlib.util.find_spec, TOOLS)):
        pytest.skip(f"none of {', '.join(TOOLS)} is installed here: make integrations-more")
    from examples.integrations import tiny

    made = tmp_path_factory.mktemp("more")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tiny.model().save_pretrained(made / "model")
    tokenizer.save_pretrained(made / "model")
    rows = [(f"{i} + {i}", f"= {2 * i}.", f"= {3 * i + 1}.") for i in range(64)]
    keys = ("instruction", "chosen", "rejected")
    factory = [{**dict(zip(keys, row, strict=True)), "output": row[1], "input": ""} for row in rows]
    (made / "sums.json").write_text(json.dumps(factory))
    pairs = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    sets = {
        "sft": {"file_name": "sums.json"},
        "dpo": {"file_name": "sums.json", "ranking": True, "columns": pairs},
    }
    (made / "dataset_info.json").write_text(json.dumps(sets))
    chats = [
        {
            "messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}],
            "rejected_response": c,
        }
        for a, b, c in rows
    ]
    (made / "sums.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (made / "ds.json").write_text(
        json.dumps(CONFIG | {"optimizer": {"type": "KFACAdamW", "params": PARAMS}})
    )
    (made / "ds_without_optimizer.json").write_text(json.dumps(CONFIG))
    (made / "kfac.py").write_text("import ds_kfac.integrations.swift\n")
    (made / "sitecustomize.py").write_text(SITE.format(pth=(ROOT / "ds_kfac.pth").read_text()))
    # LLaMA-Factory imports it, and uses it for sounds only
    if not importlib.util.find_spec("torchaudio"):
        (made / "torchaudio.py").touch()
    return made


def losses(folder: Path, *command: str, **variables: str) -> list[float]:
    """Of each step that a run logged; it has logged K-FAC's numbers, too."""
    paths = {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "PATH": f"{HERE}{os.pathsep}{os.environ['PATH']}",
    }
    given = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    given |= {"HF_HUB_OFFLINE": "1", "USE_HF": "1"}
    environment, streams = os.environ | paths | given | variables, {"capture_output": True}
    run = subprocess.run(command, env=environment, cwd=folder, text=True, timeout=900, **streams)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
    text = run.stdout + run.stderr
    assert "ds_kfac updates 100% of the trained matrix parameters" in text
    lines = re.findall(r"\{'loss': .*?\}", text)
    for name in ("eigenvalue_spread", "step_to_weight"):
        assert lines and all(f"kfac/{name}" in line for line in lines)
    return [float(re.findall(r"'loss': '?([\d.]+)", line)[0]) for line in lines]


def options_of(stage: str, out: str) -> dict[str, object]:
    """What both tools call alike."""
    return {
        "output_dir": out,
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-3 if stage == "sft" else 2e-4,
        "report_to": "none",
    }


def factory(folder: Path, stage: str, out: str, **more: str) -> list[float]:
    data = {"dataset": stage, "dataset_dir": str(folder), "cutoff_len": 64, "template": "default"}
    model = {"model_name_or_path": "model", "finetuning_type": "full", "bf16": False}
    run = {"stage": stage, "do_train": True, "use_cpu": True, "preprocessing_num_workers": 1}
    options = {**options_of(stage, out), **data, **model, **run, "deepspeed": "ds.json", **more}
    # of a .json it takes the path for a file
    (folder / f"{out}.yaml").write_text(json.dumps(options))
    command = [str(HERE / "llamafactory-cli"), "train", f"{out}.yaml"]
    return losses(folder, *command, DS_KFAC="1", FORCE_TORCHRUN="1")


def swift(folder: Path, stage: str, out: str, **more: str) -> list[float]:
    data = {"dataset": "sums.jsonl", "split_dataset_ratio": 0, "max_length": 64}
    model = {"model": "model", "model_type": "llama", "template": "dummy", "tuner_type": "full"}
    run = {"torch_dtype": "float32", "use_cpu": "true", "fp16": "false", "bf16": "false"}
    kfac = {"deepspeed": "ds_without_optimizer.json", "external_plugins": "kfac.py"}
    options = {**options_of(stage, out), **data, **model, **run, **kfac, "optimizer": "kfac_adamw"}
    options |= {"add_version": "false", **({} if stage == "sft" else {"rlhf_type": stage}), **more}
    arguments = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    return losses(folder, str(HERE / "swift"), "sft" if stage == "sft" else "rlhf", *arguments)


TOOLS = {"llamafactory": factory, "swift": swift}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_the_command_line_trains(tool, stage, folder):
    if not importlib.util.find_spec(tool):
        pytest.skip(f"{tool} is not installed here: make integrations-more")
    said = rf"^\| \S*{tool} .* {re.escape(version('deepspeed'))} \|$"
    assert re.search(said, (ROOT / "docs/notes/versions.md").read_text(), re.M)
    found = TOOLS[tool](folder, stage, f"{tool}_{stage}")
    assert len(found) == 6 and found[-1] < found[0], found
    if stage == "sft":
        checkpoint = f"{tool}_{stage}/checkpoint-3"
        again = TOOLS[tool](folder, stage, f"{tool}_again", resume_from_checkpoint=checkpoint)
        assert again == found[3:], "resumed, to the last digit that is logged"
