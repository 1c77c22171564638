"""Layers that a step does not use, and parameters that are frozen: KFACAdamW leaves them alone, as
torch would."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_kfac
from ds_kfac.step import proving
from tests.close import close
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, expected, patched, train, weights
from tests.models import FEATURES, Net, make_net
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
MODES = [
    ("adam-z0", 1),
    ("adam-z2", 2),
    ("adam-z2-groups", 1),
    ("adam-z2-offload", 2),
    ("adam-z3", 2),
    ("adam-z3-offload", 1),
    ("adam-z0-bf16", 1),
    ("adam-z0-bf16-fused", 2),
    ("adam-z1-bf16-accum32", 1),
    ("adam-z2-fp16", 1),
    ("adam-z3-bf16", 2),
]


class Alternating(Net):
    """A layer that every other step uses; ``per_step`` is how often a step calls the model."""

    per_step = 1

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.calls = nn.Linear(FEATURES, FEATURES), 0

    def forward(self, x, y=None):
        used = self.calls // self.per_step % 2 == 0
        self.calls += 1
        return super().forward(x + self.extra(x) if used else x, y)


def alternating_worker(cases) -> dict:
    results = {}
    for name, accumulation in cases:
        mode, model = BY_NAME[name], make_net(Alternating)
        model.per_step = accumulation
        engine = build(mode, accumulation, model=model)
        initial = weights(engine)
        reference = None
        if dist.get_rank() == 0:
            reference = expected(
                mode, accumulation, dist.get_world_size(), initial, model=Alternating
            )
        moved, unused, before = [], [], initial
        with patched(mode):
            for step in range(4):
                train(engine, accumulation, steps=1, first=step)
                after = weights(engine)
                moved.append({n for n in after if not torch.equal(after[n], before[n])})
                unused.append(engine.kfac.counters()["unused_layers"])
                before = after
        results[name, accumulation] = {
            "difference": difference(before, reference.weights, initial) if reference else 0.0,
            "allowed": reference.bound if reference else 1.0,
            "moved": [{"extra.weight", "extra.bias"} & names for names in moved],
            "others": [bool(names - {"extra.weight", "extra.bias"}) for names in moved],
            "unused": unused,
            "updates": [
                float(s.moments.updates)
                for n, s in engine.kfac.preconditioner.state.items()
                if n == "extra"
            ],
        }
        engine.destroy()
    return results


def test_a_layer_that_a_step_does_not_use_is_left_as_it_is_in_every_mode():
    """No step, no decay, moments and their count kept; and everything else trains like the
    reference."""
    both = {"extra.weight", "extra.bias"}
    for of_rank in run_ranks(
        "tests.deepspeed.test_unused:alternating_worker", world=2, payload=MODES
    ):
        for case, result in of_rank.items():
            assert result["moved"] == [both, set(), both, set()] and all(result["others"]), (
                case,
                result["moved"],
            )
            assert result["unused"] == [0, 1, 0, 1], (case, result["unused"])
            assert result["updates"] in ([], [2.0]), (case, result["updates"])
            assert not within(str(case), result["difference"], result["allowed"])


def frozen_worker(names: list[str]) -> dict:
    """One layer frozen from the start; later all of another one, and only the weight of a third."""
    results = {}
    for name in names:
        mode, model = BY_NAME[name], make_net(Alternating)
        model.per_step = 10**9  # used in every step
        model.extra.requires_grad_(False)
        # momentum would go on
        plain = {} if mode.adam else {"optimizer": {"type": "SGD", "params": {"lr": 0.02}}}
        engine = build(mode, 1, model=model, **plain)
        seen = [weights(engine)]
        with patched(mode):
            for step in range(4):
                if step == 2:
                    model.first.requires_grad_(False)
                    model.head.weight.requires_grad_(False)
                train(engine, 1, steps=1, first=step)
                seen.append(weights(engine))
        results[name] = [
            {n for n in now if not torch.equal(now[n], before[n])}
            for before, now in itertools.pairwise(seen)
        ]
        engine.destroy()
    return results


def test_a_frozen_parameter_is_not_moved_whenever_it_was_frozen():
    names = [
        "adam-z0",
        "adam-z1",
        "adam-z2-offload",
        "adam-z3",
        "adam-z3-offload",
        "adam-z2-bf16",
        "z2",
    ]
    frozen = {"first.weight", "first.bias", "head.weight"}
    for of_rank in run_ranks("tests.deepspeed.test_unused:frozen_worker", world=2, payload=names):
        for name, moved in of_rank.items():
            for step, parameters in enumerate(moved):
                assert not parameters & {"extra.weight", "extra.bias"}, (name, step)
                assert (frozen <= parameters) if step < 2 else not parameters & frozen, (
                    name,
                    step,
                    parameters,
                )
                assert {"middle.weight", "head.bias"} <= parameters, (name, step, parameters)


FIRST = {  # what is frozen at first, of one group or of two
    "norms": lambda name: name.startswith("norm"),
    "a whole group": lambda name: name.startswith("first"),
}


THAWED = [  # stage, what is frozen at first, 16 bits
    (0, "norms", False),
    (0, "a whole group", False),
    (0, "norms", True),
    (1, "norms", False),
    (2, "norms", True),
    (3, "a whole group", False),
]


def thawed_worker(cases) -> dict:
    """What of it moves in each of three steps, before the second of which it is unfrozen: with
    AdamW and with ours."""
    found = {}
    kinds = ["AdamW", "KFACAdamW", "object"]
    for (stage, which, half), kind in itertools.product(cases, kinds):
        if kind == "object" and stage:
            continue  # its groups go the same way
        model = make_net()
        frozen = [name for name, _ in model.named_parameters() if FIRST[which](name)]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        named = list(model.named_parameters())
        first, others = (
            [p for n, p in named if n.startswith("first") == wanted] for wanted in (True, False)
        )
        groups = (
            [*first, *others]
            if which == "norms"
            else [{"params": first, "lr": 0.02}, {"params": others}]
        )
        settings = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "steps_per_print": None,
        }
        settings |= {"bf16": {"enabled": half}}
        if kind == "object":
            given = {"optimizer": ds_kfac.KFACAdamW(groups, 0.01, torch_adam=True)}
        else:
            settings["optimizer"] = {"type": kind, "params": {"lr": 0.01, "torch_adam": True}}
            given = {"model_parameters": groups}
        engine, *_ = ds_kfac.initialize(model=model, config=settings, **given)
        for name in frozen:
            padding(model.get_parameter(name)).fill_(math.nan)
        moved = []
        for step in range(3):
            if step == 1:
                model.requires_grad_(True)
            before = local(model, frozen)
            train(engine, 1, steps=1, first=step)
            moved.append(
                [not torch.equal(a, b) for a, b in zip(before, local(model, frozen), strict=True)]
            )
        found[stage, which, half, kind] = moved
        engine.destroy()
    return found


def own_elements(p: nn.Parameter) -> int:
    """How many of a parameter's elements this rank holds."""
    if not hasattr(p, "ds_tensor"):
        return p.numel()
    return min(max(p.ds_numel - dist.get_rank() * p.ds_tensor.numel(), 0), p.ds_tensor.numel())


def padding(p: nn.Parameter) -> torch.Tensor:
    """Of this rank's part: memory that DeepSpeed's stage 3 never writes where ranks do not divide
    the elements."""
    return getattr(p, "ds_tensor", p).detach().flatten()[own_elements(p) :]


def local(model: nn.Module, names: list[str]) -> list[torch.Tensor]:
    """Weights; at stage 3 this rank's part of them, without its padding."""
    parameters = map(model.get_parameter, names)
    return [
        getattr(p, "ds_tensor", p).detach().flatten()[: own_elements(p)].clone() for p in parameters
    ]


def test_what_is_unfrozen_later_is_trained_where_adamw_trains_it():
    """At stage 0 in fp32: all other engines of DeepSpeed's drop for good what is frozen at
    first."""
    for found in run_ranks("tests.deepspeed.test_unused:thawed_worker", world=2, payload=THAWED):
        for (stage, which, half, kind), moved in found.items():
            trained = stage == 0 and not half
            assert moved == [[False] * 2, [trained] * 2, [trained] * 2], (stage, which, half, kind)


def unprepared_worker(stages: list[int]) -> list[dict]:
    proving.RAISES = False
    results = []
    for stage in stages:
        torch.manual_seed(0)
        mode = Mode("unprepared", stage, clip=0.0, kfac={"preconditioner": {"kl_clip": 0}})
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False))
        engine = build(mode, 1, model=model)
        kfac = engine.kfac.preconditioner
        for layer in kfac.layers:
            kfac.capture.fail(layer, TypeError("no matrix"))
        x = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))
        engine.backward((engine(x) - 1).square().mean())
        engine.step()
        assert not any(state.preconditioner for state in kfac.state.values())
        results.append(weights(engine))
        engine.destroy()
    return results


def test_what_no_row_prepared_steps_along_its_gradient_in_every_stage():
    first, *others = run_ranks(
        "tests.deepspeed.test_unused:unprepared_worker", world=1, payload=[0, 2, 3]
    )[0]
    for other in others:
        for name, weight in first.items():
            close(other[name], weight, sums=4 * 4 + 6 + 8, what=name)
