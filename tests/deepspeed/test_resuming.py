"""Checkpoints in other people's style: what is frozen, tied, in groups, reordered, or loaded in
part goes on as it was, or it is said."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import ds_kfac
from ds_kfac.checkpoint import moving
from tests.deepspeed.runs import train, weights
from tests.deepspeed.said import heard
from tests.deepspeed.test_moving import engine_of, in_halves
from tests.models import CLASSES, FEATURES, cross_entropy
from tests.ranks import run_ranks


class Pair(nn.Module):
    """Two layers and two norms of one size each; an embedding, of which the head may have the
    weight; an adapter beside what is frozen then."""

    def __init__(self, *, swapped: bool = False, tied: bool = False, adapter: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        for name in "ba" if swapped else "ab":
            setattr(self, f"layer_{name}", nn.Linear(16, 16))
            setattr(self, f"norm_{name}", nn.LayerNorm(16))
        self.embed, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.adapter = nn.Sequential()
        if adapter:
            self.requires_grad_(False)
            self.adapter = nn.Sequential(nn.Linear(16, 3, bias=False), nn.Linear(3, 16, bias=False))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.norm_a(self.first(x)))
        h = h + torch.tanh(self.layer_a(h)) + self.embed(torch.zeros(1, dtype=torch.long))
        z = self.head(torch.sin(self.layer_b(self.norm_b(h)) + self.adapter(h)))
        return z if y is None else cross_entropy(z, y)


def grouped(model: nn.Module) -> list[dict]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def clipping(bound: float) -> dict:
    """ZeRO 1 and 2 clip by what was saved. K-FAC's gradient goes into SGD here, too."""
    config = {"gradient_clipping": bound, "zero_allow_untested_optimizer": True}
    return {**config, "kfac": {"enabled": True, "report": "none"}}


HALVES, ALONE = {"bf16": {"enabled": True}}, {"load_optimizer_states": False}
WITHOUT = {
    "save": {"exclude_frozen_parameters": True},
    "load": {"load_module_strict": False},
    "seed": 0,
}
CASES = {
    **{f"tied-{stage}": (stage, {"model": {"tied": True}}) for stage in (0, 2, 3)},
    **{f"adapter-{stage}": (stage, {"model": {"adapter": True}}) for stage in (0, 2, 3)},
    **{
        f"without-frozen-{stage}": (stage, {"model": {"adapter": True}, **WITHOUT})
        for stage in (0, 2, 3)
    },
    **{f"groups-{stage}": (stage, {"groups": True}) for stage in (0, 2)},
    **{
        f"clip-{was}-{now}-{kind}": (
            2,
            {"kind": kind, "to": kind, "config": clipping(was), "then": clipping(now)},
        )
        for was, now in ((0.01, 0.0), (0.0, 0.01))
        for kind in ("KFACAdamW", "SGD")
    },
    **{f"swapped-{stage}": (stage, {"now": {"swapped": True}}) for stage in (0, 2, 3)},
    "move-swapped": (0, {"kind": "AdamW", "now": {"swapped": True}}),
    "weights-0": (0, {"load": ALONE}),
    "weights-0-bf16": (0, {"load": ALONE, "config": HALVES}),
    "weights-0-bf16-adamw": (0, {"load": ALONE, "config": HALVES, "kind": "AdamW", "to": "AdamW"}),
    "weights-2-bf16": (2, {"load": ALONE, "config": HALVES}),
    "module-0-bf16": (0, {"load": {"load_module_only": True}, "config": HALVES}),
    "back": (0, {"to": "AdamW"}),
}


def case(folder: str, stage: int, options: dict) -> dict | str:
    model, config = options.get("model", {}), options.get("config", {})

    def build(kind: str, seed: int, config: dict = config, **more):
        torch.manual_seed(seed)
        made, original = Pair(**more), ds_kfac.initialize
        given = grouped(made) if options.get("groups") else made.parameters()
        with patch.object(
            ds_kfac, "initialize", lambda **named: original(**{**named, "model_parameters": given})
        ):
            return engine_of(kind, stage, model=made, **config)

    first = build(options.get("kind", "KFACAdamW"), 0, **model)
    train(first, 1, steps=3)
    for tag in ("earlier", "tag"):  # latest names the second
        first.save_checkpoint(
            folder, tag=tag, client_state={"mine": tag}, **options.get("save", {})
        )
    was = weights(first)
    second = build(
        options.get("to", "KFACAdamW"),
        options.get("seed", 99),
        options.get("then", config),
        **options.get("now", model),
    )
    try:
        _, client_state = second.load_checkpoint(folder, **options.get("load", {}))
    except RuntimeError as error:
        return str(error)
    loaded = weights(second)
    for engine in (first, second):
        train(engine, 1, steps=2, first=3)
    found = {
        "was": was,
        "loaded": loaded,
        "state": client_state,
        "next": weights(second),
        "expected": weights(first),
    }
    first.destroy()
    second.destroy()
    return found


def by_hand(folder: str, kind: str) -> list[list[str]]:
    """What is said of an optimizer's own ``state_dict``, and of a checkpoint; of a model of which a
    layer was replaced since attach, whose save had failed."""
    engine, said = engine_of(kind, 0, model=Pair(), **clipping(0.0)), list[list[str]]()
    train(engine, 1, steps=2)
    engine.module.layer_b = nn.Linear(16, 16)
    engine.save_checkpoint(folder)
    for load in (
        lambda: engine.optimizer.load_state_dict(engine.optimizer.state_dict()),
        lambda: engine.load_checkpoint(folder),
    ):
        with heard() as messages:
            load()
        said.append([text for text in messages if "optimizer.load_state_dict" in text])
    engine.destroy()
    return said


def worker(folder: str) -> dict:
    said = {kind: by_hand(f"{folder}/by hand {kind}", kind) for kind in ("KFACAdamW", "SGD")}
    with in_halves("bf16", fused=False), patch.object(moving.logger, "warning"):
        return {"by hand": said} | {
            name: case(f"{folder}/{name}", *made) for name, made in CASES.items()
        }


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = str(tmp_path_factory.mktemp("resuming"))
    return run_ranks("tests.deepspeed.test_resuming:worker", world=1, payload=folder)[0]


def apart(one: dict, other: dict) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


of = partial(pytest.mark.parametrize, "name")
pytestmark = pytest.mark.distributed


@of(
    [
        name
        for name in CASES
        if name.split("-")[0] in ("tied", "adapter", "without", "groups", "clip")
    ]
)
def test_it_resumes_as_if_it_had_not_stopped(name, found):
    run = found[name]
    assert run["state"]["mine"] == "tag"
    # a step moves the weights: many times their rounding
    assert apart(run["was"], run["expected"]) > 1e-3
    assert apart(run["was"], run["loaded"]) == 0 and apart(run["expected"], run["next"]) == 0


@of([name for name in CASES if "swapped" in name])
def test_a_model_in_another_order_is_refused(name, found):
    """Weights and moments were mixed up, without a word: DeepSpeed takes them by place."""
    assert "has layer_a.weight where this model has layer_b.weight" in found[name]
    assert "load_module_only=True" in found[name]


@of([name for name in CASES if name.split("-")[0] in ("weights", "module")])
def test_weights_that_are_loaded_alone_are_those_that_go_on(name, found):
    """At stage 0 in 16 bits DeepSpeed's fp32 copies stayed those of the start, and were the weights
    after a step."""
    run, rounding = found[name], 2**-8 if "bf16" in name else 0.0
    assert apart(run["was"], run["loaded"]) <= rounding * max(
        float(W.abs().max()) for W in run["was"].values()
    )
    assert 0 < apart(run["loaded"], run["next"]) < 0.5


def test_a_state_that_the_optimizer_loads_alone_is_said_to_be_without_k_fac(found):
    """Moments of KFACAdamW's layers were lost without a word, where a program saves
    ``optimizer.state_dict()``."""
    assert all(list(map(len, said)) == [1, 0] for said in found["by hand"].values()), found[
        "by hand"
    ]


def test_a_run_without_k_fac_does_not_get_its_part_of_the_client_state(found):
    """Whoever saved it again said that there is K-FAC state, which was an older run's."""
    assert found["back"]["state"]["mine"] == "tag" and "ds_kfac" not in found["back"]["state"]
