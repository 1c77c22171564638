"""Checkpoints: resuming equals not stopping; other world sizes and stages; what is missing is
said."""

import dataclasses
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_kfac
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.checkpoint.save import save
from tests.close import exact, near
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.modes import KFAC as OFTEN
from tests.deepspeed.runs import build, patched, train, weights
from tests.deepspeed.said import error_of, heard
from tests.models import FEATURES, Net, make_batch, make_net
from tests.ranks import call_on_ranks, on_rank_0

pytestmark = pytest.mark.distributed
# Refresh at steps 0, 3, 6; saved after 4 steps, between two refreshes, so bases and factors differ
# in age.
KFAC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 3},
    "burn_in": {"steps": 0},
}
# kl-clip is by the largest rate so far, which a resumed run must know
FALLING = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": 0.02,
        "warmup_max_lr": 0.1,
        "warmup_num_steps": 2,
        "total_num_steps": 12,
    },
}


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
        "ready": kfac.curvature.ready,
        "clock": kfac.curvature.timetable.state(),
    }
    return own_state(engine) | flat(others)


def check_same(actual: dict, expected: dict, what: object) -> None:
    """States are equal to the bit, in type and in value."""
    assert actual.keys() == expected.keys(), (what, actual.keys() ^ expected.keys())
    for where, value in expected.items():
        if isinstance(value, torch.Tensor):
            exact(actual[where], value, what=f"{what} {where}")
        else:
            assert type(actual[where]) is type(value) and actual[where] == value, (what, where)


CORRECTED = {
    **OFTEN,
    "preconditioner": {**OFTEN["preconditioner"], "eigenvalues": "corrected"},
    "eigenbasis": {"refresh_interval": 1},
}
NAMES = ["z0", "z1", "z2", "z2-offload", "z3", "z1-bf16", "z1-bf16-accum32", "z3-bf16", "z2-fp16"]
NAMES += ["adam-z0", "adam-z2", "adam-z2-offload", "adam-z3", "adam-z1-bf16-accum32"]
NAMES += ["adam-z3-bf16", "adam-z2-fp16"]
RESUMED = [(name, {"kfac": KFAC}) for name in NAMES]
SPECIAL = [("z2", {"kfac": KFAC, "scheduler": FALLING}), ("z2", {"kfac": CORRECTED})]
SPECIAL += [("adam-z2-not_contiguous", {"kfac": {**KFAC, "adaptive": 0.9}})]
FIELDS = ["/peak_lr/0", "/terms", "/moments/first_OI", "/moments/second_OI", "/moments/updates"]
FIELDS += ["/last", "/before", "/captured"]
"""Ends of fields that are not what they are in a new engine."""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.ranks()
def test_resuming_gives_the_losses_of_not_stopping(world, tmp_path):
    """To the bit, in the same world and stage; and every field comes back: losses after resuming
    forgive what acts later."""
    changed = set()
    # which factors are ready each rank knows of its own, or of all after a load
    state = whole_state if world == 1 else own_state
    for number, (name, options) in enumerate(SPECIAL + RESUMED[:: 3 // world]):
        mode, folder = BY_NAME[name], tmp_path / str(number)
        with patched(mode):
            unbroken = build(mode, 1, **options)
            losses = train(unbroken, 1, steps=4)
            unbroken.save_checkpoint(str(folder), client_state={"mine": 5})
            saved = state(unbroken)
            losses += train(unbroken, 1, steps=4, first=4)
            second = build(mode, 1, seed=99, **options)
            fresh = state(second)
            changed |= {key for key in saved if str(fresh.get(key)) != str(saved[key])}
            _, client_state = second.load_checkpoint(str(folder))
            check_same(state(second), saved, name)
            assert train(second, 1, steps=4, first=4) == losses[4:], name
            if name in ("z3-bf16", "adam-z3"):
                undisturbed = build(mode, 1, **options)
                assert train(undisturbed, 1, steps=8) == losses, "saving changes nothing"
                undisturbed.destroy()
        exact(weights(second), weights(unbroken), what=name)
        kfac = second.kfac.preconditioner
        assert client_state.get("mine") == 5 and "ds_kfac" not in client_state
        assert kfac.steps == 8
        kinds = [".A.factor.pt", ".layer.pt"] + [".G.factor.pt"] * (not mode.adam)
        files = {layer + kind for layer in ("first", "head", "middle") for kind in kinds}
        written = {path.name for path in folder.rglob("kfac/*/*")}
        assert written == files | {"header.json", "states.json"}
        if "scheduler" in options:
            peak, last = float(kfac.direction.state()["peak_lr"][0]), second.get_lr()[0]
            assert last < 0.7 * peak and kfac.metrics.nu < 1, "kl-clip was at work"
        unbroken.destroy()
        second.destroy()
    for end in FIELDS:
        assert world > 1 or any(key.endswith(end) for key in changed), f"{end} was not tested"


ROWS = 8  # of the global batch, whatever the world
SIZE = 0.2
"""Of KFACAdamW's steps: with larger ones the batch is fitted, and its gradient is what rounding
leaves of it."""


def rows_engine(name: str, **options):
    """One gradient worker a layer, so that every layer's state is on one rank. SGD has no state
    that a load at another world size would lose: what a step does to the layers follows from
    weights, batch and K-FAC's state alone."""
    world, mode = dist.get_world_size(), replace(BY_NAME[name], size=SIZE)
    kfac = {**KFAC, "assignment": {"gradient_worker_fraction": 1 / world}}
    if not mode.adam:
        options["optimizer"] = {"type": "SGD", "params": {"lr": 0.02}}
    return build(mode, 1, kfac=kfac, train_micro_batch_size_per_gpu=ROWS // world, **options)


def train_rows(engine, steps: int, first: int = 0) -> None:
    rows = ROWS // engine.world_size
    share = slice(engine.global_rank * rows, (engine.global_rank + 1) * rows)
    for step in range(first, first + steps):
        x, y = make_batch(step, ROWS)
        engine.backward(engine(x[share], y[share]))
        engine.step()


def layer_weights(engine) -> dict:
    return {name: w for name, w in weights(engine).items() if "norm" not in name}


def save_states(world, folder) -> None:
    """Save after four steps. A file beside the tag has the state of all ranks, the weights, and
    those after a step more."""
    for name in SAVED[world]:
        engine = rows_engine(name)
        train_rows(engine, 4)
        engine.save_checkpoint(f"{folder}/{name}", tag="tag")
        found = {"state": merged(own_state(engine)), "weights": weights(engine)}
        train_rows(engine, 1, first=4)
        found["next"] = layer_weights(engine)
        on_rank_0(torch.save, found, f"{folder}/{name}/found")


def load_states(world, folder) -> None:
    """Into another stage or world size, and a step."""
    for case in LOADED[world]:
        saved, loaded = case
        was = torch.load(f"{folder}/{saved}/found")
        model = make_net(seed=99)
        by_engine = saved not in ("z3", "z0") and not saved.startswith("adam")
        if not by_engine:  # the state is K-FAC's alone
            model.load_state_dict(was["weights"])
        engine = rows_engine(loaded, model=model)
        if saved == loaded == "z2":  # of two ranks, into one
            with pytest.raises(CheckpointError, match="of another number of ranks"):
                engine.load_checkpoint(f"{folder}/{saved}", tag="tag")
        if by_engine:
            options = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
            engine.load_checkpoint(f"{folder}/{saved}", tag="tag", **options)
            assert engine.kfac.preconditioner.steps == 0, "K-FAC's state is the optimizer's"
            assert all(state.basis is None for state in engine.kfac.preconditioner.state.values())
        engine.kfac.load_state(f"{folder}/{saved}", "tag")
        check_same(merged(own_state(engine)), was["state"], case)
        assert engine.kfac.preconditioner.steps == 4
        train_rows(engine, 1, first=4)
        bound = 1e-3 * distance(was["next"], was["weights"])
        why = "rounding; from another state it is another step, by tenths"
        near(layer_weights(engine), was["next"], bound, why, what=str(case))
        engine.destroy()


SAVED = {1: ["z0", "z1", "adam-z0"], 2: ["z2", "z3", "adam-z2"]}
LOADED = {
    1: [("z2", "z2"), ("z3", "z2"), ("adam-z2", "adam-z0")],
    2: [("z1", "z2"), ("z0", "z3"), ("adam-z0", "adam-z2")],
    4: [("z2", "z1"), ("z3", "z3")],
}
"""World size -> what is saved there; and what is loaded there, into which mode."""


def merged(own: dict) -> dict:
    """Of all ranks, of which each has layers of its own."""
    parts: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    whole = {key: value for part in parts for key, value in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


def distance(one: dict, other: dict) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_state_loads_at_any_world_size_and_stage(tmp_path):
    for world in SAVED:
        call_on_ranks(world, save_states, world, str(tmp_path))
    for world in LOADED:
        call_on_ranks(world, load_states, world, str(tmp_path))


@pytest.mark.ranks(2)
def test_what_is_missing_or_damaged_is_said_on_every_rank(tmp_path):
    """K-FAC loads nothing then, and DeepSpeed its part."""
    mode, names = BY_NAME["z2"], ("whole", "file")
    plain = build(mode, 1, kfac={"enabled": False})
    train(plain, 1, steps=2)
    plain.save_checkpoint(f"{tmp_path}/plain", tag="tag")
    engine = build(mode, 1, kfac=KFAC)
    train(engine, 1, steps=3)
    for name in names:
        engine.save_checkpoint(f"{tmp_path}/{name}", tag="tag")
    trained = weights(engine)

    def damage() -> None:
        next(tmp_path.glob("file/tag/kfac/*/middle.layer.pt")).unlink()

    on_rank_0(damage)

    def load(name: str, *, on_missing: str = "error", **options) -> tuple[str, str]:
        """What is raised and what rank 0 says."""
        block = {**KFAC, "checkpoint": {"on_missing": on_missing}}
        fresh = build(mode, 1, seed=7, kfac=block)
        with heard() as messages:
            error = error_of(
                lambda: fresh.load_checkpoint(f"{tmp_path}/{name}", tag="tag", **options)
            )
        if name != "plain":
            exact(weights(fresh), trained, what=name)
        if name != "plain" and not options:
            states = fresh.basic_optimizer.state.values()
            assert {float(state["step"]) for state in states if state} == {3.0}, name
        assert fresh.kfac.preconditioner.steps == 0, "nothing is loaded by halves"
        assert all(loss == loss for loss in train(fresh, 1, steps=1))
        return error, "\n".join(messages)

    error, _ = load("file")
    assert "middle.layer.pt: is missing" in error
    assert '"checkpoint": {"on_missing": "fresh"}' in error, "a way that keeps the rest"
    nowhere = error_of(lambda: engine.kfac.load_state(str(tmp_path), "no_such_tag"))
    assert "no K-FAC state" in nowhere
    for case, text in (
        (load("file", on_missing="fresh"), "middle.layer.pt: is missing"),
        (load("plain"), "no K-FAC state, K-FAC starts afresh"),
        (load("whole", load_module_only=True), "load_module_only=True: K-FAC starts afresh"),
    ):
        error, said = case
        assert error == "" and (text in said or dist.get_rank() > 0), (error, said)


@pytest.mark.ranks(2)
def test_an_overwritten_tag_never_mixes_two_saves(tmp_path):
    mode, folder = BY_NAME["z2"], str(tmp_path)
    engine = build(mode, 1, kfac=KFAC)
    train(engine, 1, steps=4)
    engine.save_checkpoint(folder, tag="tag")
    first = own_state(engine)
    train(engine, 1, steps=2)
    save(engine.kfac.job, tmp_path / "tag")  # killed before DeepSpeed wrote its files
    fresh = build(mode, 1, seed=99, kfac=KFAC)
    fresh.load_checkpoint(folder, tag="tag")
    check_same(own_state(fresh), first, "a killed save")
    assert fresh.kfac.preconditioner.steps == 4
    engine.save_checkpoint(folder, tag="tag")
    dist.barrier()
    folders = [path for path in (tmp_path / "tag/kfac").iterdir() if path.is_dir()]
    assert len(folders) == 1, "old states are removed after the new save is complete"

    plain = build(mode, 1, kfac={"enabled": False})
    train(plain, 1, steps=1)
    plain.save_checkpoint(folder, tag="tag")
    # has trained, and the folder of an older save is still there
    fresh.load_checkpoint(folder, tag="tag")
    kfac = fresh.kfac.preconditioner
    assert all(float(factor.updates) == 0 for factor in kfac.curvature.factors.values())
    assert all(state.basis is None for state in kfac.state.values())
    assert kfac.steps == 0 and not kfac.direction.state().get("peak_lr")


def regrouped(stage: int, left_out: list[str]):
    """An engine with three equal layers, some of which are not K-FAC's."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "KFACAdamW", "params": {"torch_adam": True}},
        "kfac": {**KFAC, "layers": {"exclude": left_out}},
        "zero_allow_untested_optimizer": True,
    }
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    return ds_kfac.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.ranks(1)
def test_a_state_of_other_layers_is_refused_also_where_its_sizes_fit(stage, tmp_path):
    first = regrouped(stage, ["0"])
    first.backward(first(torch.randn(8, 4)).square().mean())
    first.step()
    first.save_checkpoint(str(tmp_path), tag="tag")

    def said(left_out: list[str]) -> str:
        engine = regrouped(stage, left_out)
        return error_of(partial(engine.load_checkpoint, str(tmp_path), tag="tag"))

    assert said(["0"]) == ""
    assert "has 0.weight, 1.weight in other parameter groups: kfac.layers" in said(["1"])
    for left_out in (["0", "1"], []):
        assert "has other parameter groups than this engine's KFACTorchAdamW" in said(left_out)


class Twin(Net):
    """Two layers share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x, y=None):
        return super().forward(x + torch.tanh(self.one(x)) * self.other(x), y)


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
