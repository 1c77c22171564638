"""Checkpoints: resuming equals not stopping; other world sizes and stages, also by universal
checkpoints; what is missing is said."""

import dataclasses
import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.save import save
from ds_kfac.directions.kfac_adamw.optimizer import FLAG, KFACTorchAdamW
from ds_kfac.step import proving
from tests.close import exact, near
from tests.deepspeed.features import QueryNet
from tests.deepspeed.modes import BY_NAME, CLIPPED, CORRECTED
from tests.deepspeed.modes import KFAC as OFTEN
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import heard
from tests.deepspeed.test_moving import ROWS, converted, train_rows
from tests.models import CLASSES, FEATURES, Net, cross_entropy, make_net
from tests.ranks import call_on_ranks, of_ranks, on_rank_0

# Refresh at steps 0, 3, 6; saved after 4 steps, between two refreshes, so bases and factors differ
# in age.
KFAC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 3},
    "burn_in": {"steps": 0},
}


# models of other people


class Adapted(nn.Module):
    """A head that is tied to an embedding; a frozen layer; and adapters whose names are no file
    names: they have slashes or 300 letters, or differ in case alone."""

    KEYS = ("en/de", "/tmp/escape", "x" * 300, "head", "Head")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 16).requires_grad_(False), nn.LayerNorm(16)
        self.adapters = nn.ModuleDict({key: nn.Linear(16, 16) for key in self.KEYS})
        self.embed, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.first(x)) + self.embed(torch.zeros(1, dtype=torch.long))
        for adapter in self.adapters.values():
            h = h + torch.tanh(adapter(h))
        return cross_entropy(self.head(h), y)


class Masked(Net):
    """A hook masks a weight's gradient, as in pruning, so the layer fails every proof."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(self.first.weight.numel()).view_as(self.first.weight) % 2
        self.first.weight.register_hook(lambda gradient: gradient * mask)


# what a checkpoint brings back


def flat(value, name: str = "") -> dict:
    """Copies of every tensor and plain number in dataclasses, sequences and mappings, by where it
    is."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    elif isinstance(value, (set, frozenset)):
        value = dict.fromkeys(sorted(value), True)
    if isinstance(value, dict):
        parts = (flat(part, f"{name}/{key}") for key, part in value.items())
        return {where: leaf for part in parts for where, leaf in part.items()}
    if isinstance(value, torch.Tensor):
        return {name: value.clone()}
    plain = isinstance(value, (bool, int, float, str, type(None)))
    return {name: value if plain else type(value).__name__}


def own_state(engine) -> dict:
    """Of the layers and factors that this rank keeps."""
    kfac = engine.kfac.preconditioner
    return flat({"layers": kfac.state, "factors": kfac.curvature.factors})


def whole_state(engine) -> dict:
    """Everything that a checkpoint brings back on this rank."""
    kfac = engine.kfac.preconditioner
    others = {
        "steps": kfac.steps,
        "peak_lr": kfac.direction.state().get("peak_lr", {}),
        "clock": kfac.curvature.timetable.state(),
        "proofs": kfac.proving.state(),
        "observations": replace(kfac.observations, rows=kfac.observations.rows or None),
    }
    if dist.get_world_size() == 1:  # each rank knows of its own, or of all after a load
        others["ready"] = kfac.curvature.ready
    return own_state(engine) | flat(others)


def check_same(actual: dict, expected: dict, what: object) -> None:
    """States are equal to the bit, in type and in value."""
    assert actual.keys() == expected.keys(), (what, actual.keys() ^ expected.keys())
    for where, value in expected.items():
        if isinstance(value, torch.Tensor):
            exact(actual[where], value, what=f"{what} {where}")
        else:
            assert type(actual[where]) is type(value) and actual[where] == value, (what, where)


# resuming


@dataclass(frozen=True)
class Run:
    """A run that stops and is resumed.

    Attributes:
        mode: its name.
        options: of ``runs.build``; ``then`` are those of the resumed run besides.
        frozen: whether frozen parameters are saved.
        changed: ends of fields that are not what they are in a new engine.
    """

    mode: str
    options: dict[str, Any] = field(default_factory=lambda: {"kfac": KFAC})
    then: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Net
    frozen: bool = True
    changed: tuple[str, ...] = ()

    def engine(self, seed: int = 0, **options):
        model = make_net(self.model, seed)
        return build(BY_NAME[self.mode], model=model, **{**self.options, **options})


# kl-clip is by the largest rate so far, which a resumed run must know
RATES = {"warmup_min_lr": 0.02, "warmup_max_lr": 0.1, "warmup_num_steps": 2, "total_num_steps": 12}
FALLING = {"kfac": KFAC, "scheduler": {"type": "WarmupDecayLR", "params": RATES}}
ADAPTIVE = {"kfac": {**KFAC, "adaptive": 0.9}}
NAMES = ["z0", "z2", "z3", "z1-bf16", "z1-bf16-accum32", "z3-bf16", "z2-fp16", "adam-z0", "adam-z2"]
NAMES += ["adam-z2-offload", "adam-z3", "adam-z1-bf16-accum32", "adam-z2-fp16"]
MOMENTS = ("/moments/first_OI", "/moments/second_OI", "/moments/updates")
ANYWHERE = [
    Run("z2", FALLING, changed=("/peak_lr/0", "/captured")),
    Run("z2", {"kfac": {**OFTEN, **CORRECTED}}, changed=("/terms",)),
    Run("adam-z2-not_contiguous", ADAPTIVE, changed=(*MOMENTS, "/last", "/before")),
    Run("adam-z2", model=Masked, changed=("/unfit/first", "/clock/proofs")),
]
STAGES = ("adam-z0", "adam-z2", "adam-z3")
ON_ONE = [
    *(Run(name, model=Adapted, frozen=frozen) for name in STAGES for frozen in (True, False)),
    *(Run(f"{name}-groups") for name in STAGES[:2]),
    # ZeRO 1 and 2 clip by what was saved
    *(
        Run(name, {"kfac": KFAC, "gradient_clipping": was}, {"gradient_clipping": CLIPPED - was})
        for name in ("adam-z2", "z2")
        for was in (CLIPPED, 0.0)
    ),
]
ON_TWO = [*(Run(name) for name in NAMES), Run("z2", model=Adapted)]
RESUMED = [(run, 1) for run in ANYWHERE + ON_ONE] + [(run, 2) for run in ANYWHERE + ON_TWO]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("run", "world"), RESUMED, ids=[f"{run.mode}-{world}" for run, world in RESUMED]
)
def test_resuming_gives_the_losses_of_not_stopping(run, world):
    """To the bit, in the same world and stage; and every field comes back: losses after resuming
    forgive what acts later."""
    with patch.object(proving, "RAISES", run.model is not Masked):
        resume(run, world)


def resume(run: Run, world: int) -> None:
    folder, unbroken = shared_folder(), run.engine()
    save, load = {}, {}
    if not run.frozen:
        save, load = {"exclude_frozen_parameters": True}, {"load_module_strict": False}
    losses = train(unbroken, 1, steps=4)
    for tag in ("earlier", "tag"):  # latest names the second
        unbroken.save_checkpoint(folder, tag=tag, client_state={"mine": tag}, **save)
    saved, was = whole_state(unbroken), weights(unbroken)
    second = run.engine(99 if run.frozen else 0, **run.then)
    fresh = whole_state(second)
    changed = {key for key in saved if str(fresh.get(key)) != str(saved[key])}
    for end in run.changed:
        assert world > 1 or any(key.endswith(end) for key in changed), f"{end} was not tested"
    _, client_state = second.load_checkpoint(folder, **load)
    assert client_state.get("mine") == "tag" and "ds_kfac" not in client_state
    check_same(whole_state(second), saved, run.mode)
    exact(weights(second), was)
    losses += train(unbroken, 1, steps=4, first=4)
    assert train(second, 1, steps=4, first=4) == losses[4:]
    exact(weights(second), weights(unbroken))
    kfac = second.kfac.preconditioner
    assert kfac.steps == 8
    if run.mode in ("z3-bf16", "adam-z3"):
        assert train(run.engine(), 1, steps=8) == losses, "saving changes nothing"
    if "scheduler" in run.options:
        peak, last = float(kfac.direction.state()["peak_lr"][0]), second.get_lr()[0]
        assert last < 0.7 * peak and kfac.metrics.nu < 1, "kl-clip was at work"


# another world size, another stage

SIZE = 0.2
"""Of KFACAdamW's steps: with larger ones the batch is fitted, and its gradient is what rounding
leaves of it."""


def rows_engine(name: str, *, sgd: bool = False, **options):
    """One gradient worker a layer, so that every layer's state is on one rank.

    Args:
        sgd: it has no state that a load at another world size would lose: what a step does to the
            layers follows from weights, batch and K-FAC's state alone.
    """
    world, mode = dist.get_world_size(), replace(BY_NAME[name], size=SIZE)
    kfac = {**KFAC, "assignment": {"gradient_worker_fraction": 1 / world}}
    if sgd:
        options["optimizer"] = {"type": "SGD", "params": {"lr": 0.02}}
    return build(mode, 1, kfac=kfac, train_micro_batch_size_per_gpu=ROWS // world, **options)


def merged(own: dict) -> dict:
    """Of all ranks, of which each has layers of its own."""
    parts = of_ranks(own)
    whole = {key: value for part in parts for key, value in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


@dataclass(frozen=True)
class Load:
    """A state that another engine loads, if not from a universal checkpoint K-FAC's alone."""

    saved: str
    ranks: int
    loaded: str
    world: int
    universal: bool = True

    @property
    def sgd(self) -> bool:
        return not self.universal and not self.saved.startswith("adam")

    @property
    def folder(self) -> str:
        return f"{self.saved}-{self.ranks}" + "-sgd" * self.sgd


UNIVERSAL = [
    Load("z2", 2, "z2", 1),
    Load("adam-z2", 2, "adam-z1", 1),
    Load("adam-z1", 2, "adam-z2", 1),
    Load("adam-z1-bf16-accum32", 2, "adam-z1-bf16-accum32", 1),
    Load("adam-z3", 2, "adam-z3", 1),
]
"""AdamW steps the norm's parameters, whose moments are DeepSpeed's to convert."""
LOADS = [
    Load("z2", 2, "z2", 1, universal=False),
    Load("adam-z2", 2, "adam-z0", 1, universal=False),
    Load("z0", 1, "z3", 2, universal=False),
    Load("z2", 2, "z1", 4, universal=False),
    *UNIVERSAL,
]


def save_states(folder, loads) -> None:
    """Save after four steps. A file beside the tag has the state of all ranks, the weights, and
    those after a step more."""
    for case in {case.folder: case for case in loads}.values():
        engine = rows_engine(case.saved, sgd=case.sgd)
        train_rows(engine, 4)
        engine.save_checkpoint(f"{folder}/{case.folder}", tag="tag")
        found = {"state": merged(own_state(engine)), "weights": weights(engine)}
        train_rows(engine, 1, first=4)
        found["next"] = weights(engine)
        on_rank_0(torch.save, found, f"{folder}/{case.folder}/found")
        engine.destroy()


def load_states(folder, loads) -> None:
    """Into another stage or world size, and a step."""
    for case in loads:
        place = f"{folder}/{case.folder}"
        was, model = torch.load(f"{place}/found"), make_net(seed=99)
        if not case.universal:
            model.load_state_dict(was["weights"])
        universal = {"load_universal": case.universal}
        engine = rows_engine(case.loaded, sgd=case.sgd, model=model, checkpoint=universal)
        if case.universal:
            engine.load_checkpoint(place, tag="tag_universal")
            exact(weights(engine), was["weights"], what=str(case))
        elif case.loaded == "z2":
            with pytest.raises(CheckpointError, match="another number of ranks"):
                engine.load_checkpoint(place, tag="tag")
        if not case.universal:
            engine.kfac.load_state(place, "tag")
        check_same(merged(own_state(engine)), was["state"], case)
        assert engine.kfac.preconditioner.steps == 4
        assert engine.kfac.preconditioner.observations.rows is None, "they were those of a rank"
        train_rows(engine, 1, first=4)
        kept = [name for name in was["next"] if case.universal or "norm" not in name]
        actual, expected = ({n: of[n] for n in kept} for of in (weights(engine), was["next"]))
        # with AdamW's moments of the other parameters: of bf16 only as good as its products
        moved = max(float((w - was["weights"][n]).abs().max()) for n, w in expected.items())
        bound = (0.2 if "bf16" in case.saved else 1e-3) * moved
        why = "rounding; from another state it is another step, by tenths"
        near(actual, expected, bound, why, what=str(case))
        assert not moments_of_layers(engine), case
        engine.destroy()


def moments_of_layers(engine) -> list[torch.Tensor]:
    """What the inner optimizer keeps of parameters that are K-FAC's."""
    inner = engine.basic_optimizer
    ours = {id(p) for group in inner.param_groups if group.get(FLAG) for p in group["params"]}
    if engine.zero_optimization_stage() == 3:
        partitions = engine.optimizer.fp32_partitioned_groups_flat
        groups = engine.optimizer.sub_group_to_group_id.values()
        pairs = zip(partitions, groups, strict=True)
        ours = {id(p) for p, group in pairs if inner.param_groups[group].get(FLAG)}
    states = [state for p, state in inner.state.items() if id(p) in ours]
    return [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]


def save_and_load(folder: Path, loads: list[Load]) -> None:
    for ranks in sorted({case.ranks for case in loads}):
        saved = [case for case in loads if case.ranks == ranks]
        call_on_ranks(ranks, save_states, str(folder), saved)
    universal = {case.folder for case in loads if case.universal}
    converted([folder / name / "tag" for name in universal])
    for world in sorted({case.world for case in loads}):
        loaded = [case for case in loads if case.world == world]
        call_on_ranks(world, load_states, str(folder), loaded)


@pytest.mark.distributed
def test_state_loads_at_any_world_size_and_stage(tmp_path):
    """ds_to_universal does not copy the kfac folder; it is found next to the converted tag. Before,
    it stopped at KFACAdamW's groups, which keep no optimizer state (KeyError: exp_avg)."""
    save_and_load(tmp_path, LOADS)


# a tag that is written again


def state_of(kfac) -> tuple[int, int, int]:
    """Its steps, and how many factors and layers have something."""
    factors = sum(float(factor.updates) > 0 for factor in kfac.curvature.factors.values())
    bases = sum(state.basis is not None for state in kfac.state.values())
    return kfac.steps, factors, bases


@pytest.mark.ranks(2)
def test_an_overwritten_tag_never_mixes_two_saves(tmp_path):
    engine, fresh = (build(BY_NAME["z2"], seed=seed, kfac=KFAC) for seed in (0, 99))
    train(engine, 1, steps=4)
    engine.save_checkpoint(str(tmp_path), tag="tag")
    first = own_state(engine)
    train(engine, 1, steps=2)
    save(engine.kfac.job, tmp_path / "tag")  # killed before DeepSpeed wrote its files
    fresh.load_checkpoint(str(tmp_path), tag="tag")
    check_same(own_state(fresh), first, "a killed save")
    assert fresh.kfac.preconditioner.steps == 4
    engine.save_checkpoint(str(tmp_path), tag="tag")
    dist.barrier()
    folders = [path for path in (tmp_path / "tag/kfac").iterdir() if path.is_dir()]
    assert len(folders) == 1, "old states are removed after the new save is complete"
    plain = build(BY_NAME["z2"], kfac={"enabled": False})
    train(plain, 1, steps=1)
    plain.save_checkpoint(str(tmp_path), tag="tag")
    with heard() as said:  # it has trained, and the folder of an older save is still there
        fresh.load_checkpoint(str(tmp_path), tag="tag")
    assert any("no K-FAC state, K-FAC starts afresh" in text for text in said) or dist.get_rank()
    exact(weights(fresh), weights(plain))
    assert state_of(fresh.kfac.preconditioner) == (0, 0, 0)
    assert not fresh.kfac.preconditioner.direction.state().get("peak_lr")


@pytest.mark.ranks(1)
def test_a_save_from_before_layers_shared_loads_when_they_do(tmp_path):
    engine = build(BY_NAME["z0"], 1, model=make_net(QueryNet))
    kfac, shared = engine.kfac.preconditioner, (("q", "k"), ("gate", "up"))
    engine.save_checkpoint(str(tmp_path), tag="early")
    train(engine, 1, steps=2)
    assert kfac.observations.groups == shared
    engine.load_checkpoint(str(tmp_path), tag="early")
    assert kfac.observations.groups == shared
    assert kfac.curvature.factors.keys() == kfac.curvature.specs.keys()
    train(engine, 1, steps=2)
    engine.save_checkpoint(str(tmp_path), tag="late")  # of such factors only as there are


def test_zeros_in_place_of_moments_take_no_space():
    matrix, bias = nn.Parameter(torch.ones(256, 256)), nn.Parameter(torch.ones(7))
    groups = [{"params": [matrix], FLAG: True}, {"params": [bias], FLAG: False}]
    optimizer = KFACTorchAdamW(groups, lr=0.02)
    matrix.grad, bias.grad = torch.ones_like(matrix), torch.ones_like(bias)
    optimizer.step()
    saved, buffer = optimizer.state_dict(), io.BytesIO()
    exact(
        [saved["state"][0][key] for key in ("exp_avg", "exp_avg_sq")], [torch.zeros(256, 256)] * 2
    )
    assert saved["state"][0]["step"] == 1, "that of the others, which may be asked for in its place"
    torch.save(saved, buffer)
    assert buffer.tell() < 8000 < matrix.nbytes
