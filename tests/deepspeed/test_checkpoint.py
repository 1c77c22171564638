"""Checkpoints: resuming equals not stopping; other world sizes and stages, also by universal
checkpoints; what is missing is said."""

import dataclasses
import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
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
from tests.deepspeed.modes import BY_NAME, CLIPPED
from tests.deepspeed.modes import KFAC as OFTEN
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, patched, train, weights
from tests.deepspeed.said import error_of, heard
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


class Pair(nn.Module):
    """An embedding, of which the head may have the weight; an adapter beside what is frozen
    then."""

    def __init__(self, *, tied: bool = False, adapter: bool = False) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.embed, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.adapter = nn.Sequential()
        if adapter:
            self.requires_grad_(False)
            self.adapter = nn.Sequential(nn.Linear(16, 3, bias=False), nn.Linear(3, 16, bias=False))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = h + torch.tanh(self.layer(h)) + self.embed(torch.zeros(1, dtype=torch.long))
        return cross_entropy(self.head(torch.sin(h + self.adapter(h))), y)


class Adapters(nn.Module):
    """Names that are no file names: keys of a ModuleDict, one with a leading slash, one with 300
    letters, two that differ in case alone."""

    KEYS = ("en/de", "/tmp/escape", "up/", "x" * 300, "head", "Head")

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({key: nn.Linear(FEATURES, FEATURES) for key in self.KEYS})
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x, y):
        for adapter in self.adapters.values():
            x = x + torch.tanh(adapter(x))
        return cross_entropy(self.out(x), y)


class Twin(Net):
    """Two layers share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x, y=None):
        return super().forward(x + torch.tanh(self.one(x)) * self.other(x), y)


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


class Masked(Net):
    """A hook masks a weight's gradient, as in pruning, so the layer fails every proof."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(self.first.weight.numel()).view_as(self.first.weight) % 2
        self.first.weight.register_hook(lambda gradient: gradient * mask)


@dataclass(frozen=True)
class Run:
    """A run that stops and is resumed.

    Attributes:
        mode: its name.
        options: of ``runs.build``; ``then`` are those of the resumed run besides.
        model: with these arguments.
        changed: ends of fields that are not what they are in a new engine.
    """

    mode: str
    options: dict[str, Any] = field(default_factory=lambda: {"kfac": KFAC})
    then: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Net
    save: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    groups: str = "one"
    seed: int = 99
    changed: tuple[str, ...] = ()

    def engine(self, seed: int = 0, **options):
        mode = replace(BY_NAME[self.mode], groups=self.groups)
        with patched(mode):
            options = {**self.options, **options}
            return build(mode, model=make_net(self.model, seed), **options)


def clips(bound: float) -> dict:
    return {"gradient_clipping": bound}


# kl-clip is by the largest rate so far, which a resumed run must know
RATES = {"warmup_min_lr": 0.02, "warmup_max_lr": 0.1, "warmup_num_steps": 2, "total_num_steps": 12}
FALLING = {"kfac": KFAC, "scheduler": {"type": "WarmupDecayLR", "params": RATES}}
CORRECTED = {
    **OFTEN,
    "preconditioner": {**OFTEN["preconditioner"], "eigenvalues": "corrected"},
    "eigenbasis": {"refresh_interval": 1},
}
ADAPTIVE = {"kfac": {**KFAC, "adaptive": 0.9}}
NAMES = ["z0", "z1", "z2", "z2-offload", "z3", "z1-bf16", "z1-bf16-accum32", "z3-bf16", "z2-fp16"]
NAMES += ["adam-z0", "adam-z2", "adam-z2-offload", "adam-z3", "adam-z1-bf16-accum32"]
NAMES += ["adam-z3-bf16", "adam-z2-fp16"]
MOMENTS = ("/moments/first_OI", "/moments/second_OI", "/moments/updates")
ANYWHERE = [
    Run("z2", FALLING, changed=("/peak_lr/0", "/captured")),
    Run("z2", {"kfac": CORRECTED}, changed=("/terms",)),
    Run("adam-z2-not_contiguous", ADAPTIVE, changed=(*MOMENTS, "/last", "/before")),
    Run("adam-z2", model=Masked, changed=("/unfit/first", "/clock/proofs")),
]
WITHOUT_FROZEN = {
    "save": {"exclude_frozen_parameters": True},
    "load": {"load_module_strict": False},
    "seed": 0,
}
ADAPTER, STAGES = partial(Pair, adapter=True), ("adam-z0", "adam-z2", "adam-z3")
ON_ONE = [
    *(Run(name, model=partial(Pair, tied=True)) for name in STAGES),
    *(Run(name, model=ADAPTER) for name in STAGES),
    *(Run(name, model=ADAPTER, **WITHOUT_FROZEN) for name in STAGES),
    *(Run(name, groups="decay") for name in STAGES[:2]),
    # ZeRO 1 and 2 clip by what was saved
    *(
        Run(name, {"kfac": KFAC, **clips(was)}, clips(now))
        for name in ("adam-z2", "z2")
        for was, now in ((CLIPPED, 0.0), (0.0, CLIPPED))
    ),
]
ON_TWO = [*(Run(name) for name in NAMES), Run("z2", model=Adapters)]
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
    losses = train(unbroken, 1, steps=4)
    for tag in ("earlier", "tag"):  # latest names the second
        unbroken.save_checkpoint(folder, tag=tag, client_state={"mine": tag}, **run.save)
    saved, was = whole_state(unbroken), weights(unbroken)
    second = run.engine(run.seed, **run.then)
    fresh = whole_state(second)
    changed = {key for key in saved if str(fresh.get(key)) != str(saved[key])}
    for end in run.changed:
        assert world > 1 or any(key.endswith(end) for key in changed), f"{end} was not tested"
    _, client_state = second.load_checkpoint(folder, **run.load)
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


def distance(one: dict, other: dict) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@dataclass(frozen=True)
class Load:
    """A state that another engine loads.

    Attributes:
        way: "engine": weights by the engine, then K-FAC's state; "state": K-FAC's alone;
            "universal": everything from a universal checkpoint.
    """

    saved: str
    ranks: int
    loaded: str
    world: int
    way: str = "universal"

    @property
    def sgd(self) -> bool:
        return self.way != "universal" and not self.saved.startswith("adam")

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
    Load("z2", 2, "z2", 1, "engine"),
    Load("z3", 2, "z2", 1, "state"),
    Load("adam-z2", 2, "adam-z0", 1, "state"),
    Load("z1", 1, "z2", 2, "engine"),
    Load("z0", 1, "z3", 2, "state"),
    Load("adam-z0", 1, "adam-z2", 2, "state"),
    Load("z2", 2, "z1", 4, "engine"),
    Load("z3", 2, "z3", 4, "state"),
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
        if case.way == "state":
            model.load_state_dict(was["weights"])
        universal = {"load_universal": case.way == "universal"}
        engine = rows_engine(case.loaded, sgd=case.sgd, model=model, checkpoint=universal)
        if case.way == "universal":
            engine.load_checkpoint(place, tag="tag_universal")
            exact(weights(engine), was["weights"], what=str(case))
        elif case.way == "engine":
            load_weights_alone(engine, place)
        if case.way != "universal":
            engine.kfac.load_state(place, "tag")
        check_same(merged(own_state(engine)), was["state"], case)
        assert engine.kfac.preconditioner.steps == 4
        train_rows(engine, 1, first=4)
        kept = [name for name in was["next"] if case.way == "universal" or "norm" not in name]
        actual, expected = ({n: of[n] for n in kept} for of in (weights(engine), was["next"]))
        # with AdamW's moments of the other parameters: of bf16 only as good as its products
        bound = (0.2 if "bf16" in case.saved else 1e-3) * distance(expected, was["weights"])
        why = "rounding; from another state it is another step, by tenths"
        near(actual, expected, bound, why, what=str(case))
        assert not moments_of_layers(engine), case
        engine.destroy()


def load_weights_alone(engine, place: str) -> None:
    if engine.zero_optimization_stage() == 2 and engine.world_size == 1:
        with pytest.raises(CheckpointError, match="another number of ranks"):
            engine.load_checkpoint(place, tag="tag")
    options = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    engine.load_checkpoint(place, tag="tag", **options)
    state = state_of(engine.kfac.preconditioner)
    assert state == (0, 0, 0), "K-FAC's state is the optimizer's"


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
    universal = {case.folder for case in loads if case.way == "universal"}
    converted([folder / name / "tag" for name in universal])
    for world in sorted({case.world for case in loads}):
        loaded = [case for case in loads if case.world == world]
        call_on_ranks(world, load_states, str(folder), loaded)


@pytest.mark.distributed
def test_state_loads_at_any_world_size_and_stage(tmp_path):
    """ds_to_universal does not copy the kfac folder; it is found next to the converted tag. Before,
    it stopped at KFACAdamW's groups, which keep no optimizer state (KeyError: exp_avg)."""
    save_and_load(tmp_path, LOADS)


# what is missing


FRESH = {"kfac": {**KFAC, "checkpoint": {"on_missing": "fresh"}}}
MISSING = [
    ("file", {}, {}, "middle.layer.pt: is missing"),
    ("file", FRESH, {}, "middle.layer.pt: is missing"),
    ("file", {}, {"load_module_only": True}, "load_module_only=True: K-FAC starts afresh"),
    ("plain", {}, {}, "no K-FAC state, K-FAC starts afresh"),
]
"""What is saved, of the config, of the load, and what is raised or said."""


@pytest.mark.ranks(2)
def test_what_is_missing_is_said_on_every_rank(tmp_path):
    """K-FAC loads nothing then, and DeepSpeed its part."""
    plain = build(BY_NAME["z2"], kfac={"enabled": False})
    train(plain, 1, steps=2)
    plain.save_checkpoint(f"{tmp_path}/plain", tag="tag")
    engine = build(BY_NAME["z2"], kfac=KFAC)
    train(engine, 1, steps=3)
    engine.save_checkpoint(f"{tmp_path}/file", tag="tag")
    on_rank_0(lambda: next(tmp_path.glob("file/tag/kfac/*/middle.layer.pt")).unlink())
    for name, config, load, words in MISSING:
        fresh = build(BY_NAME["z2"], seed=7, **{"kfac": KFAC, **config})
        load_it = partial(fresh.load_checkpoint, f"{tmp_path}/{name}", tag="tag", **load)
        with heard() as messages:
            error = error_of(load_it)
        if words == MISSING[0][-1] and not config:
            assert words in error
            assert '"checkpoint": {"on_missing": "fresh"}' in error, "a way that keeps the rest"
        else:
            assert error == "" and (words in "\n".join(messages) or dist.get_rank() > 0), messages
        exact(weights(fresh), weights(engine if name == "file" else plain))
        assert state_of(fresh.kfac.preconditioner) == (0, 0, 0), "nothing is loaded by halves"
        assert all(loss == loss for loss in train(fresh, 1, steps=1))


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
    # has trained, and the folder of an older save is still there
    fresh.load_checkpoint(str(tmp_path), tag="tag")
    assert state_of(fresh.kfac.preconditioner) == (0, 0, 0)
    assert not fresh.kfac.preconditioner.direction.state().get("peak_lr")


@pytest.mark.ranks(1)
def test_a_save_from_before_layers_shared_loads_when_they_do(tmp_path):
    engine = build(BY_NAME["z0"], 1, model=make_net(Twin))
    kfac, shared = engine.kfac.preconditioner, (("one", "other"),)
    engine.save_checkpoint(str(tmp_path), tag="early")
    train(engine, 1, steps=2)
    assert kfac.observations.groups == shared
    engine.load_checkpoint(str(tmp_path), tag="early")
    assert kfac.observations.groups == shared
    assert kfac.curvature.factors.keys() == kfac.curvature.specs.keys()
    train(engine, 1, steps=2)
    engine.save_checkpoint(str(tmp_path), tag="late")  # of such factors only as there are


def test_zeros_in_place_of_moments_take_no_space_and_are_not_loaded():
    matrix, bias = nn.Parameter(torch.ones(256, 256)), nn.Parameter(torch.ones(7))
    groups = [{"params": [matrix], FLAG: True}, {"params": [bias], FLAG: False}]
    optimizer, other = (KFACTorchAdamW([{**g} for g in groups], lr=0.02) for _ in range(2))
    for _ in range(3):
        matrix.grad, bias.grad = torch.ones_like(matrix), torch.ones_like(bias)
        optimizer.step()
    saved = optimizer.state_dict()
    zeros = [saved["state"][0][key] for key in ("exp_avg", "exp_avg_sq")]
    exact(zeros, [torch.zeros(256, 256)] * 2)
    assert saved["state"][0]["step"] == 3, "that of the others, which may be asked for in its place"
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    assert buffer.tell() < 8000 < matrix.nbytes
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert matrix not in other.state
    exact(other.state[bias]["exp_avg"], optimizer.state[bias]["exp_avg"])
