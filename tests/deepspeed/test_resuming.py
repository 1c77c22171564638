"""Checkpoints in other people's style: what is frozen, tied, in groups, reordered, or loaded in
part goes on as it was, or it is said."""

import pytest
import torch
from torch import Tensor, nn

from tests.close import exact, near
from tests.deepspeed.runs import train, weights
from tests.deepspeed.said import error_of, heard
from tests.deepspeed.test_moving import engine_of, in_halves
from tests.models import CLASSES, FEATURES, cross_entropy

pytestmark = pytest.mark.distributed


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


def pair_engine(kind: str, stage: int, seed: int, model=None, groups: bool = False, **config):
    torch.manual_seed(seed)
    made = Pair(**(model or {}))
    parameters = grouped(made) if groups else None
    return engine_of(kind, stage, model=made, parameters=parameters, **config)


def saved_engine(folder, kind: str, stage: int, save: dict | None = None, **options):
    """An engine that has saved its third step twice; latest names the second."""
    engine = pair_engine(kind, stage, 0, **options)
    train(engine, 1, steps=3)
    for tag in ("earlier", "tag"):
        engine.save_checkpoint(str(folder), tag=tag, client_state={"mine": tag}, **(save or {}))
    return engine


def clipping(bound: float) -> dict:
    """ZeRO 1 and 2 clip by what was saved. K-FAC's gradient goes into SGD here, too."""
    config = {"gradient_clipping": bound, "zero_allow_untested_optimizer": True}
    return {**config, "kfac": {"enabled": True, "report": "none"}}


STAGES = (0, 2, 3)
ADAPTER = {"model": {"adapter": True}}
WITHOUT_FROZEN = ADAPTER | {
    "save": {"exclude_frozen_parameters": True},
    "load": {"load_module_strict": False},
    "seed": 0,
}
RESUMED = [("KFACAdamW", stage, {"model": {"tied": True}}) for stage in STAGES]
RESUMED += [("KFACAdamW", stage, ADAPTER) for stage in STAGES]
RESUMED += [("KFACAdamW", stage, WITHOUT_FROZEN) for stage in STAGES]
RESUMED += [("KFACAdamW", stage, {"groups": True}) for stage in (0, 2)]
RESUMED += [
    (kind, 2, clipping(was) | {"then": clipping(now)})
    for kind in ("KFACAdamW", "SGD")
    for was, now in ((0.01, 0.0), (0.0, 0.01))
]


@pytest.mark.ranks(1)
def test_it_resumes_as_if_it_had_not_stopped(tmp_path):
    for number, (kind, stage, case) in enumerate(RESUMED):
        options, folder = {**case}, tmp_path / str(number)
        load, seed = options.pop("load", {}), options.pop("seed", 99)
        then = options.pop("then", {})
        first = saved_engine(folder, kind, stage, **options)
        options.pop("save", None)
        was = weights(first)
        second = pair_engine(kind, stage, seed, **options | then)
        _, client_state = second.load_checkpoint(str(folder), **load)
        assert client_state["mine"] == "tag"
        exact(weights(second), was, what=f"{kind} {stage} {case}")
        for engine in (first, second):
            train(engine, 1, steps=2, first=3)
        exact(weights(second), weights(first), what=f"{kind} {stage} {case}")
        moved = [float((weights(first)[name] - weight).abs().max()) for name, weight in was.items()]
        assert max(moved) > 1e-3, "a step moves the weights: many times their rounding"


@pytest.mark.ranks(1)
def test_a_model_in_another_order_is_refused(tmp_path):
    """Weights and moments were mixed up, without a word: DeepSpeed takes them by place."""
    for kind, stage in (("KFACAdamW", 0), ("KFACAdamW", 2), ("KFACAdamW", 3), ("AdamW", 0)):
        folder = f"{tmp_path}/{kind}-{stage}"
        saved_engine(folder, kind, stage)
        swapped = pair_engine("KFACAdamW", stage, 99, model={"swapped": True})
        said = error_of(lambda: swapped.load_checkpoint(folder))  # noqa: B023
        assert "has layer_a.weight where this model has layer_b.weight" in said, said
        assert "load_module_only=True" in said


HALVES, ALONE = {"bf16": {"enabled": True}}, {"load_optimizer_states": False}


@pytest.mark.ranks(1)
def test_weights_that_are_loaded_alone_are_those_that_go_on(tmp_path):
    """At stage 0 in 16 bits DeepSpeed's fp32 copies stayed those of the start, and were the weights
    after a step."""
    for number, (kind, stage, config, load) in enumerate(
        [
            ("KFACAdamW", 0, {}, ALONE),
            ("KFACAdamW", 0, HALVES, ALONE),
            ("AdamW", 0, HALVES, ALONE),
            ("KFACAdamW", 2, HALVES, ALONE),
            ("KFACAdamW", 0, HALVES, {"load_module_only": True}),
        ]
    ):
        with in_halves("bf16", fused=False):
            was = weights(saved_engine(tmp_path / str(number), kind, stage, **config))
            engine = pair_engine(kind, stage, 99, **config)
            engine.load_checkpoint(str(tmp_path / str(number)), **load)
            loaded = weights(engine)
            rounding = 2**-8 if config else 0.0
            largest = max(float(weight.abs().max()) for weight in was.values())
            near(loaded, was, rounding * largest, "bf16, where it is", what=f"{kind} {stage}")
            train(engine, 1, steps=2, first=3)
            near(weights(engine), loaded, 0.5, "two steps", what=f"{kind} {stage}")


@pytest.mark.ranks(1)
def test_a_state_that_the_optimizer_loads_alone_is_said_to_be_without_k_fac(tmp_path):
    """Moments of KFACAdamW's layers were lost without a word, where a program saves
    ``optimizer.state_dict()``. Of a model a layer of which was replaced since attach, whose save
    had failed."""
    for kind in ("KFACAdamW", "SGD"):
        engine, folder = pair_engine(kind, 0, 0, **clipping(0.0)), str(tmp_path / kind)
        train(engine, 1, steps=2)
        engine.module.layer_b = nn.Linear(16, 16)
        engine.save_checkpoint(folder)
        with heard() as messages:
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        assert sum("optimizer.load_state_dict" in text for text in messages) == 1, messages
        with heard() as messages:
            engine.load_checkpoint(folder)
        assert not any("optimizer.load_state_dict" in text for text in messages), messages


@pytest.mark.ranks(1)
def test_a_run_without_k_fac_does_not_get_its_part_of_the_client_state(tmp_path):
    """Whoever saved it again said that there is K-FAC state, which was an older run's."""
    saved_engine(tmp_path, "KFACAdamW", 0)
    _, client_state = pair_engine("AdamW", 0, 99).load_checkpoint(str(tmp_path))
    assert client_state["mine"] == "tag" and "ds_kfac" not in client_state
