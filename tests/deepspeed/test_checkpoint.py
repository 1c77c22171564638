"""Checkpoints: resuming equals not stopping; other world sizes and stages; what is missing is said."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, patched, train, weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
# Refresh at steps 0, 3, 6; saved after 4 steps, between two refreshes, so bases and factors differ in age.
KFAC = {"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 3}}


def own_state(engine) -> dict:
    kfac = engine.kfac.optimizer
    found = {}
    for name, state in kfac.state.items():
        keys = [f"{name}/{side}" for side in "AG" if f"{name}/{side}" in kfac.curvature.specs]
        factors = [kfac.curvature.factors[key].factor for key in keys]
        moments = vars(state.adam).values() if state.adam else ()
        packed = [part for factor in factors for part in (factor.packed_P, factor.updates)]
        found[name] = [*state.A.vectors, *packed, state.terms, state.G.values, *moments]
    return found


def engine_of(name: str, **options):
    """One gradient worker a layer, so that every layer's state is on one rank."""
    kfac = {**KFAC, "assignment": {"gradient_worker_fraction": 1 / torch.distributed.get_world_size()}}
    return build(BY_NAME[name], 1, **{"kfac": kfac, **options})


def resume_worker(payload) -> dict:
    folder, names = payload
    results = {}
    for name in names:
        mode = BY_NAME[name]
        with patched(mode):
            unbroken = build(mode, 1, kfac=KFAC)
            losses = train(unbroken, 1, steps=8)
            first = build(mode, 1, kfac=KFAC)
            train(first, 1, steps=4)
            first.save_checkpoint(f"{folder}/{name}", client_state={"mine": 5})
            second = build(mode, 1, seed=99, kfac=KFAC)
            _, client_state = second.load_checkpoint(f"{folder}/{name}")
            resumed = train(second, 1, steps=4, first=4)
        difference = max(
            float((a - b).norm() / b.norm())
            for a, b in zip(weights(second).values(), weights(unbroken).values(), strict=True)
        )
        results[name] = {
            "losses": losses[4:], "resumed": resumed, "difference": difference, "client_state": client_state,
            "steps": second.kfac.optimizer.steps, "files": sorted(p.name for p in Path(folder, name).rglob("kfac/*/*")),
        }  # fmt: skip
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_gives_the_losses_of_not_stopping(world, tmp_path):
    names = ["z0", "z1", "z2", "z2-offload", "z3", "z1-bf16", "z1-bf16-accum32", "z3-bf16", "z2-fp16"]
    names += [
        f"adam-{name}" for name in ("z0", "z1", "z2", "z2-offload", "z3", "z1-bf16-accum32", "z3-bf16", "z2-fp16")
    ]
    results = run_ranks("tests.deepspeed.test_checkpoint:resume_worker", world=world, payload=(str(tmp_path), names))
    for result in results:
        for name, run in result.items():
            assert run["resumed"] == pytest.approx(run["losses"], rel=1e-6), (name, run)
            assert run["difference"] < 1e-6, (name, run)
            assert run["client_state"].get("mine") == 5 and "ds_kfac" not in run["client_state"]
            assert run["steps"] == 8
            kinds = [".A.factor.pt", ".pt"] + [".G.factor.pt"] * (not name.startswith("adam"))
            files = [layer + kind for layer in ("first", "head", "middle") for kind in kinds]
            assert run["files"] == sorted([*files, "header.json"]), "each factor and each layer once, nothing else"


def save_worker(payload) -> dict:
    folder, names = payload
    states = {}
    for name in names:
        engine = engine_of(name)
        train(engine, 1, steps=4)
        engine.save_checkpoint(f"{folder}/{name}", tag="tag")
        states[name] = own_state(engine)
    return states


def load_worker(payload) -> dict:
    """Into another stage or world size: DeepSpeed loads the weights where it can, K-FAC its state always."""
    folder, cases = payload
    results = {}
    for saved, loaded, how in cases:
        engine = engine_of(loaded, seed=99)
        if how == "engine":
            options = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
            engine.load_checkpoint(f"{folder}/{saved}", tag="tag", **options)
        else:
            engine.kfac.load_state(f"{folder}/{saved}", "tag")
        state, steps = own_state(engine), engine.kfac.optimizer.steps
        losses = train(engine, 1, steps=2, first=4)
        results[saved, loaded, how] = {"state": state, "steps": steps, "losses": losses}
        engine.destroy()
    return results


def test_state_loads_at_any_world_size_and_stage(tmp_path):
    saved = {}
    for world, names in ((1, ["z0", "z1", "adam-z2"]), (2, ["z2", "z3", "adam-z3"])):
        parts = run_ranks("tests.deepspeed.test_checkpoint:save_worker", world=world, payload=(str(tmp_path), names))
        saved |= {name: {layer: t for part in parts for layer, t in part[name].items()} for name in names}
    cases = {
        1: [("z2", "z2", "engine"), ("z3", "z2", "state"), ("adam-z3", "adam-z2", "state")],
        2: [
            ("z1", "z2", "engine"),
            ("z2", "z0", "engine"),
            ("z0", "z3", "state"),
            ("adam-z2", "adam-z0", "state"),
            ("adam-z2", "adam-z2", "engine"),
        ],
        4: [("z2", "z1", "engine"), ("z3", "z3", "state")],
    }
    for world in cases:
        payload = (str(tmp_path), cases[world])
        results = run_ranks("tests.deepspeed.test_checkpoint:load_worker", world=world, payload=payload)
        for case in cases[world]:
            parts, expected = [result[case] for result in results], saved[case[0]]
            actual = {layer: tensors for part in parts for layer, tensors in part["state"].items()}
            assert sum(len(part["state"]) for part in parts) == len(actual) == len(expected) == 3
            for layer, tensors in expected.items():
                same = [torch.equal(a, b) for a, b in zip(actual[layer], tensors, strict=True)]
                assert all(same), (case, world, layer)
            assert all(part["steps"] == 4 and all(loss < 10 for loss in part["losses"]) for part in parts), case


def text_of(action) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def damage_worker(folder: str) -> dict:
    """Checkpoints without, with incomplete and with foreign K-FAC state."""
    import logging

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    deepspeed.utils.logger.addHandler(handler)
    deepspeed.utils.logger.setLevel("WARNING")
    mode, results = BY_NAME["z2"], {}
    plain = build(mode, 1, kfac={"enabled": False})
    train(plain, 1, steps=2)
    plain.save_checkpoint(f"{folder}/plain", tag="tag")
    engine = build(mode, 1, kfac=KFAC)
    train(engine, 1, steps=3)
    for name in ("module_only", "missing_file", "missing_folder", "version", "other_model"):
        engine.save_checkpoint(f"{folder}/{name}", tag="tag")
    small = {**KFAC, "checkpoint": {"eigenbasis": False}}
    lean = build(mode, 1, kfac=small)
    train(lean, 1, steps=4)  # a refresh was due at step 3, with the factors that are saved
    lean.save_checkpoint(f"{folder}/lean", tag="tag")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        saves = {path.parents[2].name: path for path in Path(folder).glob("*/tag/kfac/*") if path.is_dir()}
        (saves["missing_file"] / "middle.pt").unlink()
        payload = torch.load(saves["other_model"] / "head.A.factor.pt")
        torch.save({**payload, "packed": payload["packed"][:-3]}, saves["other_model"] / "head.A.factor.pt")
        saves["missing_folder"].parent.rename(saves["missing_folder"].parent.with_name("gone"))
        header = saves["version"] / "header.json"
        header.write_text(json.dumps({**json.loads(header.read_text()), "version": 99}))
    torch.distributed.barrier()

    def load(name, **options):
        fresh = build(mode, 1, kfac=small if name == "lean" else KFAC)
        messages.clear()
        error = text_of(lambda: fresh.load_checkpoint(f"{folder}/{name}", tag="tag", **options))
        return {"error": error, "said": "\n".join(m for m in messages if "ds_kfac" in m), "engine": fresh}

    for name in ("plain", "missing_file", "other_model", "missing_folder", "version", "lean"):
        results[name] = load(name)
    results["module_only"] = load("module_only", load_module_only=True)
    for name, result in results.items():
        fresh = result.pop("engine")
        result["steps"] = fresh.kfac.optimizer.steps
        result["trains"] = all(loss == loss for loss in train(fresh, 1, steps=1))
        if name == "lean":
            pairs = [(own_state(fresh)[n][0], own_state(lean)[n][0]) for n in own_state(lean)]
            result["recomputed"] = max([0.0] + [float((a - b).norm() / b.norm()) for a, b in pairs])
    results["nowhere"] = {"error": text_of(lambda: engine.kfac.load_state(folder, "no_such_tag"))}
    return results


def test_what_is_missing_or_damaged_is_said_on_every_rank(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()):
        results = run_ranks("tests.deepspeed.test_checkpoint:damage_worker", world=2, payload=str(tmp_path))
    for rank, result in enumerate(results):
        assert result["plain"]["error"] == "" and result["plain"]["steps"] == 0
        assert "middle.pt" in result["missing_file"]["error"], result["missing_file"]
        assert "factor head/A of this model and config (dense, 20 wide) needs 210" in result["other_model"]["error"]
        assert "no K-FAC state" in result["missing_folder"]["error"]
        assert "version 99" in result["version"]["error"]
        assert "no K-FAC state" in result["nowhere"]["error"]
        for name in ("missing_file", "other_model", "version", "missing_folder", "module_only"):
            assert result[name]["steps"] == 0, "nothing is loaded by halves"
            assert result[name]["trains"]
        assert result["lean"]["error"] == "" and result["lean"]["steps"] == 4
        assert result["lean"]["recomputed"] < 0.5, "bases come from the saved factors"
        if rank == 0:
            assert "no K-FAC state, K-FAC starts afresh" in result["plain"]["said"]
            assert "load_module_only: K-FAC starts afresh" in result["module_only"]["said"]


def overwrite_worker(folder: str) -> dict:
    """A tag written again: by a killed save, by a run without K-FAC; and loaded by an engine that has trained."""
    from ds_kfac import checkpoint

    mode, results = BY_NAME["z2"], {}
    engine = build(mode, 1, kfac=KFAC)
    train(engine, 1, steps=4)
    engine.save_checkpoint(folder, tag="tag")
    first = own_state(engine)
    train(engine, 1, steps=2)
    checkpoint.save(engine.kfac.optimizer, Path(folder, "tag"))  # killed before DeepSpeed wrote its files
    fresh = build(mode, 1, seed=99, kfac=KFAC)
    fresh.load_checkpoint(folder, tag="tag")
    same = all(torch.equal(a, b) for n in first for a, b in zip(own_state(fresh)[n], first[n], strict=True))
    results["killed save"] = same, fresh.kfac.optimizer.steps
    engine.save_checkpoint(folder, tag="tag")
    torch.distributed.barrier()
    results["folders"] = len([path for path in Path(folder, "tag/kfac").iterdir() if path.is_dir()])

    plain = build(mode, 1, kfac={"enabled": False})
    train(plain, 1, steps=1)
    plain.save_checkpoint(folder, tag="tag")
    fresh.load_checkpoint(folder, tag="tag")  # has trained, and the folder of an older save is still there
    kfac = fresh.kfac.optimizer
    empty = all(float(state.factor.updates) == 0 for state in kfac.curvature.factors.values())
    empty = empty and all(state.basis is None for state in kfac.state.values())
    results["plain save over it"] = empty, kfac.steps, kfac.peak_lr
    return results


def test_an_overwritten_tag_never_mixes_two_saves(tmp_path):
    for result in run_ranks("tests.deepspeed.test_checkpoint:overwrite_worker", world=2, payload=str(tmp_path)):
        assert result["killed save"] == (True, 4)
        assert result["folders"] == 1, "old states are removed after the new save is complete"
        assert result["plain save over it"] == (True, 0, {})


def universal_worker(folder: str) -> dict:
    engine = build(BY_NAME["z2"], 1, kfac=KFAC, checkpoint={"load_universal": True})
    engine.load_checkpoint(folder, tag="tag_universal")
    kfac = engine.kfac.optimizer
    return {"state": own_state(engine), "steps": kfac.steps, "weights": weights(engine)}


def universal_save_worker(folder: str) -> dict:
    engine = build(BY_NAME["z2"], 1, kfac=KFAC)
    train(engine, 1, steps=4)
    engine.save_checkpoint(folder, tag="tag")
    return {"state": own_state(engine), "weights": weights(engine)}


def test_a_universal_checkpoint_resumes_at_another_world_size(tmp_path):
    """ds_to_universal does not copy the kfac folder; it is found beside the converted tag."""
    saved = run_ranks("tests.deepspeed.test_checkpoint:universal_save_worker", world=2, payload=str(tmp_path))
    tag, universal = tmp_path / "tag", tmp_path / "tag_universal"
    arguments = ["--input_folder", str(tag), "--output_folder", str(universal), "--inject_missing_state"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "latest_universal").write_text("tag_universal")
    (result,) = run_ranks("tests.deepspeed.test_checkpoint:universal_worker", world=1, payload=str(tmp_path))
    expected = {name: tensors for part in saved for name, tensors in part["state"].items()}
    assert result["steps"] == 4 and result["state"].keys() == expected.keys()
    for name, tensors in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(result["state"][name], tensors, strict=True)), name
    assert all(torch.equal(result["weights"][n], w) for n, w in saved[0]["weights"].items())
