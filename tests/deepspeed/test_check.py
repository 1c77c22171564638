"""``check`` and attach are of one mind: of what is refused, of nulls, of rates and of the plan."""

import contextlib
import copy
import io
import json
from pathlib import Path

import pytest
from torch import nn

import ds_kfac
from ds_kfac.__main__ import main
from ds_kfac.estimate.subject import Subject

pytestmark = pytest.mark.distributed
SGD = {"type": "SGD", "params": {"lr": 1.0}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
OURS = {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True}}
HIGH = {"type": "KFACAdamW", "params": {"lr": 0.2, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.2}}
LOW = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 2e-3}}
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
SAMPLED = {"factor": {"fisher": "monte_carlo", "prediction": "tail"}}
BETAS = {"type": "KFACAdamW", "params": {"betas": [0.9, 1.5]}}

REFUSED = {
    "no module 'tail'": {"optimizer": SGD, "kfac": SAMPLED},
    "cannot be offloaded in part": {"optimizer": OURS, "zero_optimization": OFFLOAD},
    "optimizer.params.betas": {"optimizer": BETAS},
    "no optimizer": {"kfac": {}},
}
ZERO_2 = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
HALVES = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
FITS = {
    "AdamW": {"optimizer": ADAMW, "kfac": {}},
    "SGD": {"optimizer": SGD, "kfac": {}, **ZERO_2},
    "KFACAdamW": {"optimizer": OURS},
    "KFACAdamW, bf16": {"optimizer": OURS, **HALVES},
    "a high rate": {"optimizer": HIGH},
    "a high rate of its schedule": {"optimizer": OURS, "scheduler": WARMUP},
    "a low rate of its schedule": {"optimizer": HIGH, "scheduler": LOW},
}


class Net(nn.Module):
    """Of the kind that recipes are for, with words."""

    def __init__(self, words: int = 0) -> None:
        super().__init__()
        if words:
            self.words = nn.Embedding(words, 5)
        self.first, self.norm, self.head = (
            nn.Linear(5, 7),
            nn.LayerNorm(7),
            nn.Linear(7, words or 3),
        )


class Words(Net):
    def __init__(self) -> None:
        super().__init__(50)


def checked(folder: Path, config: dict, model: type[nn.Module]) -> str:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(["check", "--config", str(path), "--model", f"{__name__}:{model.__name__}"])
    return printed.getvalue()


def engine_of(config: dict, model: type[nn.Module] = Net):
    made, config = model(), copy.deepcopy(config)
    return ds_kfac.initialize(model=made, model_parameters=made.parameters(), config=config)[0]


@pytest.mark.ranks(1)
def test_what_attach_refuses_check_refuses_in_the_same_words(tmp_path):
    for text, config in REFUSED.items():
        config = {"train_micro_batch_size_per_gpu": 2, **config}
        with pytest.raises(ValueError, match=text):
            ds_kfac.attach(engine_of(config))  # an engine without an optimizer has none yet
        said = checked(tmp_path, config, Net)
        assert said.startswith("ds_kfac check: ") and text in said, said


@pytest.mark.ranks(1)
def test_what_fits_is_planned_and_summed_up_as_attach_does(tmp_path):
    for name, config in FITS.items():
        config = {"train_micro_batch_size_per_gpu": 2, **config}
        said, kfac = checked(tmp_path, config, Words), engine_of(config, Words).kfac
        assert said.splitlines()[1:6] == kfac.report.splitlines()[:5], (name, said)
        for text in (said, kfac.report):
            assert ("far from every recipe" in text) == name.startswith("a high rate"), (name, text)
        subject, rule = Subject(Words(), config), kfac.preconditioner.rule
        assert subject.rule is rule and subject.config == kfac.preconditioner.config
        assert rule.moments_count(subject.config) == subject.rule.moments_count(subject.config)
