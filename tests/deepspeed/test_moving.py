"""A running job moves from AdamW to KFACAdamW and back: at stage 0 as it is, else by a universal
checkpoint. What would mix up weights or moments is refused."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn

import ds_kfac
from tests.close import exact, near
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import patched, train, weights
from tests.deepspeed.said import error_of, heard
from tests.models import CLASSES, FEATURES, Net, cross_entropy, make_batch, make_net
from tests.programs import python
from tests.ranks import ROOT, call_on_ranks, on_rank_0

KINDS = ("AdamW", "KFACAdamW")
EPS = {"AdamW": 1e-8, "KFACAdamW": 2e-8}
"""Settings that can be told apart, and make no difference to a step."""
PARAMS = {
    "AdamW": {"lr": 0.01, "torch_adam": True, "eps": EPS["AdamW"]},
    "KFACAdamW": {"lr": 0.01, "adam_lr": 0.01, "torch_adam": True, "eps": EPS["KFACAdamW"]},
    "SGD": {"lr": 0.01, "momentum": 0.9},
}


class Partly(Net):
    """With a frozen layer, and a buffer, which are others' at a start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)
        self.register_buffer("seen", torch.randn(3))


class Alike(nn.Module):
    """Layers and norms of one size each, in one of two orders."""

    def __init__(self, order: str = "abc") -> None:
        super().__init__()
        for name in order:
            setattr(self, f"layer_{name}", nn.Linear(FEATURES, FEATURES, bias=False))
            setattr(self, f"norm_{name}", nn.LayerNorm(FEATURES))

    def forward(self, x, y):
        for name in "abc":
            x = torch.tanh(getattr(self, f"layer_{name}")(getattr(self, f"norm_{name}")(x)))
        return cross_entropy(x[..., :CLASSES], y)


class PerStep(torch.optim.lr_scheduler.LambdaLR):
    """Says by its rate how many steps it has made."""

    def __init__(self, optimizer) -> None:
        super().__init__(optimizer, lambda step: 1 - 0.01 * step)


COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2}}
"""DeepSpeed's. It leaves no initial rates in groups; a fresh engine's rate is that of its first
step, 0."""


@dataclass(frozen=True)
class Place:
    """Where a job runs.

    Attributes:
        kind: of the optimizer; K-FAC is on where it is ours.
        fused: in 16 bits, with the wrapper that DeepSpeed takes for its own Adam.
        cosine: with a scheduler of DeepSpeed's.
        partly: with a frozen layer.
    """

    kind: str
    stage: int = 0
    bits: str = "fp32"
    fused: bool = False
    cosine: bool = False
    partly: bool = True

    @property
    def name(self) -> str:
        return "-".join(map(str, dataclasses.astuple(self)))

    def patched(self):
        """Engines in 16 bits need it."""
        if self.bits == "fp32":
            return contextlib.nullcontext()
        return patched(Mode("halves", 0, self.bits, fused=self.fused, adam=True))


def engine_of(place: Place, *, seed: int = 0, model: Callable | None = None, **more):
    """``more``: of the config."""
    config = {
        "train_batch_size": ROWS,
        "zero_optimization": {"stage": place.stage},
        "gradient_clipping": 0.0,
        "optimizer": {"type": place.kind, "params": PARAMS[place.kind]},
        "kfac": {"enabled": place.kind == "KFACAdamW", "report": "none"},
        **more,
    }
    if place.bits != "fp32":
        config[place.bits] = {"enabled": True}
    if place.bits == "fp16":  # the scale grows in four steps
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 2}
    if place.cosine:
        config["scheduler"] = COSINE
    init = contextlib.nullcontext()
    if place.stage == 3:
        init = deepspeed.zero.Init(config_dict_or_path=config)
    with init:
        made = make_net(model or (Partly if place.partly else Net), seed)
    return ds_kfac.initialize(
        model=made,
        model_parameters=made.parameters(),
        config=config,
        lr_scheduler=None if place.cosine else PerStep,
    )[0]


ROWS = 8  # of the global batch, whatever the world


def train_rows(engine, steps: int, first: int = 0) -> None:
    rows, dtype = ROWS // engine.world_size, engine.get_data_types()[0]
    share = slice(engine.global_rank * rows, (engine.global_rank + 1) * rows)
    for step in range(first, first + steps):
        x, y = make_batch(step, ROWS)
        engine.backward(engine(x[share].to(dtype), y[share]))
        engine.step()


def converted(tags: list[Path]) -> None:
    """To universal checkpoints beside them."""
    script = "import sys; import deepspeed.checkpoint.ds_to_universal as convert\n"
    options = "--inject_missing_state --num_extract_workers 1 --num_merge_workers 1".split()
    for tag in tags:
        given = ["", "--input_folder", str(tag), "--output_folder", f"{tag}_universal", *options]
        script += f"sys.argv = {given!r}; convert.main(convert.parse_arguments())\n"
    python("-c", script, folder=ROOT, path=str(ROOT), DS_ACCELERATOR="cpu")


def state(engine) -> tuple:
    """What moves beside weights and moments."""
    scale = engine.optimizer.loss_scale if engine.fp16_enabled() else None
    return engine.global_steps, engine.basic_optimizer.param_groups[0]["lr"], scale


def moments_of_adamw(engine) -> dict:
    """Parameter -> both moments."""
    keys, get = ("exp_avg", "exp_avg_sq"), safe_get_full_optimizer_state
    zero, state = engine.zero_optimization(), engine.optimizer.state
    return {
        name: [get(p, key) if zero else state[p][key].clone() for key in keys]
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


def moments_of_layers(engine) -> dict:
    """The same of K-FAC layers, which have no basis yet."""
    found, kfac = {}, engine.kfac.preconditioner
    for layer in kfac.layers:
        moments = kfac.state[layer.name].moments
        both, columns = (moments.first_OI, moments.second_OI), layer.A.dim - bool(layer.bias)
        found[layer.weight] = [part[:, :columns] for part in both]
        if layer.bias:
            found[layer.bias] = [part[:, -1] for part in both]
    return found


def check_next_step(was: dict, actual: dict, rounding: float, case: str) -> None:
    """Parameters that AdamW steps go on as if nothing had happened; all else begins anew."""
    for name, weight in was["weights"].items():
        step = float((was["next"][name] - weight).abs().max())
        if step == 0.0:  # frozen
            exact(actual[name], weight, what=case)
        else:
            difference = float((actual[name] - was["next"][name]).abs().max()) / step
            # another step is another one by tenths
            assert (difference < rounding) == name.startswith("norm."), (case, name, difference)


HALVES = [
    (("fp16", False), ("fp16", True)),
    (("fp16", True), ("fp16", False)),
    (("bf16", True), ("fp32", False)),
    (("fp32", False), ("bf16", False)),
]
"""Into the other wrapper, or another precision: whoever moves may have another torch_adam, or
another machine. They were refused: DeepSpeed keeps fp32 weights and moments by group, in lists or
one flat tensor."""
BOTH_WAYS = (KINDS, KINDS[::-1])
MOVES = [(Place(one, at), Place(other, at)) for one, other in BOTH_WAYS for at in (0, 2, 3)]
MOVES += [
    (Place("AdamW", 1), Place("KFACAdamW", 2)),
    (Place("AdamW", 1, cosine=True), Place("KFACAdamW", 1, cosine=True)),
    *(
        (Place(one, 0, *then, partly=False), Place(other, 0, *now, partly=False))
        for one, other in BOTH_WAYS
        for then, now in HALVES
    ),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def save_places(folder) -> None:
    for place in dict(MOVES):
        with place.patched():
            engine = engine_of(place)
            train_rows(engine, 4)
            engine.save_checkpoint(f"{folder}/{place.name}", tag="tag", client_state={"mine": 5})
            found = {"weights": weights(engine), "state": state(engine)}
            found["seen"] = getattr(engine.module, "seen", None)
            if place.kind == "AdamW" and place.bits == "fp32":
                found["moments"] = moments_of_adamw(engine)
            train_rows(engine, 1, first=4)
            found["next"] = weights(engine)
            on_rank_0(torch.save, found, f"{folder}/{place.name}/found")
            engine.destroy()


def load_places(folder) -> None:
    for then, now in MOVES:
        with now.patched():
            move(folder, then, now)


def move(folder, then: Place, now: Place) -> None:
    case, was = f"{then.name} to {now.name}", torch.load(f"{folder}/{then.name}/found")
    engine = engine_of(now, seed=99, checkpoint={"load_universal": then.stage > 0})
    tag = "tag_universal" if then.stage else "tag"
    with heard() as messages:
        _, client_state = engine.load_checkpoint(f"{folder}/{then.name}", tag=tag)
    (said,) = [text for text in messages if text.startswith("ds_kfac: ")]
    moved = {"AdamW": "Warm up the learning rate again", "KFACAdamW": "AdamW's moments of all"}
    assert moved[now.kind] in said
    # or whoever saved it again would say that there is K-FAC state
    assert client_state["mine"] == 5 and "ds_kfac" not in client_state
    exact(weights(engine), was["weights"], what=case)
    if then.partly:
        exact(engine.module.seen, was["seen"], what=case)
    assert state(engine) == was["state"], case
    assert {group["eps"] for group in engine.basic_optimizer.param_groups} == {EPS[now.kind]}
    if now.stage < 3:
        rounded = {name: weight.to(DTYPES[now.bits]) for name, weight in was["weights"].items()}
        exact({name: p.data for name, p in engine.module.named_parameters()}, rounded, what=case)
    if now.kind == "KFACAdamW":
        moments = moments_of_layers(engine)
        assert all(first.any() for first, _ in moments.values())
        if "moments" in was:
            exact(moments, {name: was["moments"][name] for name in moments}, what=case)
        engine.save_checkpoint(f"{folder}/moved", tag="tag")
    train_rows(engine, 1, first=4)
    check_next_step(was, weights(engine), 1e-4 if {then.bits, now.bits} == {"fp32"} else 0.05, case)
    if now == Place("AdamW"):
        for name, p in engine.module.named_parameters():
            steps = 5 if name.startswith("norm.") else 1
            assert not p.requires_grad or int(engine.optimizer.state[p]["step"]) == steps, name
    train_rows(engine, 8, first=5)
    if now.kind == "KFACAdamW":
        assert engine.kfac.counters()["steps"] == 9, case
        resumed = engine_of(now, seed=98)
        resumed.load_checkpoint(f"{folder}/moved", tag="tag")
        train_rows(resumed, 9, first=4)
        exact(weights(resumed), weights(engine), what=case)
        resumed.destroy()
    engine.destroy()


@pytest.mark.distributed
def test_weights_step_schedule_and_adamws_moments_move_to_the_other_optimizer(tmp_path):
    """DeepSpeed alone leaves all weights but those of the first group as they were, at stages 1 and
    2; and frozen weights and buffers, when it loads a universal checkpoint."""
    call_on_ranks(2, save_places, tmp_path)
    converted([tmp_path / place.name / "tag" for place in dict(MOVES) if place.stage])
    call_on_ranks(1, load_places, tmp_path)


DIRECT = [
    (Place("AdamW", 2), Place("KFACAdamW", 2)),
    (Place("AdamW", 3), Place("KFACAdamW", 3)),
    (Place("KFACAdamW", 1), Place("AdamW", 1)),
    # whose moments are others
    (Place("KFACAdamW", 0, "bf16"), Place("SGD", 0, "bf16")),
    (Place("SGD", 0, "bf16"), Place("KFACAdamW", 0, "bf16")),
    # other stages
    (Place("AdamW", 0), Place("KFACAdamW", 2)),
    (Place("KFACAdamW", 2), Place("AdamW", 0)),
    (Place("KFACAdamW", 2), Place("KFACAdamW", 3)),
    (Place("KFACAdamW", 3), Place("KFACAdamW", 2)),
]
SAVED_AT = {0: "stage 0", 2: "stage 1 or 2", 3: "stage 3"}


@pytest.mark.ranks(1)
def test_what_cannot_be_loaded_is_told_what_to_do(tmp_path):
    """And what it says works, followed to the letter. At stage 0 in 16 bits DeepSpeed's fp32 copies
    stayed those of the start, and were the weights after a step."""
    for then, now in DIRECT:
        with then.patched():
            check_remedy(then, now, f"{tmp_path}/{then.name}-{now.name}")


def check_remedy(then: Place, now: Place, folder: str) -> None:
    first, second = engine_of(then), engine_of(now, seed=99)
    train(first, 1, steps=2)
    first.save_checkpoint(folder, tag="tag")
    was = weights(first)
    said = error_of(partial(second.load_checkpoint, folder, tag="tag"))
    if now.stage != then.stage:
        where = f"was saved at ZeRO {SAVED_AT[then.stage]}, but this engine has stage {now.stage}"
        assert where in said, (then, now, said)
        model = make_net(Partly, seed=99)
        exec(said.partition("zero.Init: ")[2], {"model": model})
        exact({n: p.data for n, p in model.named_parameters()}, was, what=f"{then} {now}")
        return
    assert "has other parameter groups" in said, (then, now, said)
    assert "load_module_only=True, load_optimizer_states=False" in said, (then, now, said)
    convert = f"ds_to_universal --inject_missing_state --input_folder {folder}/tag "
    universal = convert in said and '"checkpoint": {"load_universal": true}' in said
    assert universal == (now.stage > 0), (then, now, said)
    alone = {"load_optimizer_states": False, "load_module_only": now.stage > 0}
    engine = engine_of(now, seed=99)
    engine.load_checkpoint(folder, tag="tag", **alone)
    loaded, largest = weights(engine), max(float(weight.abs().max()) for weight in was.values())
    rounding = 2**-8 * largest if now.bits == "bf16" else 0.0
    near(loaded, was, rounding, "bf16, where it is", what=f"{then} {now}")
    train(engine, 1, steps=2)
    near(weights(engine), loaded, 0.5, "two steps", what=f"{then} {now}")


def excluding(*layers: str) -> dict:
    return {"kfac": {"enabled": True, "report": "none", "layers": {"exclude": list(layers)}}}


SWAPPED = "has layer_a.weight where this model has layer_b.weight"
OTHER_GROUPS = "has other parameter groups than this engine's optimizer"
OF_ANOTHER = "has layer_a.weight, layer_b.weight in other parameter groups"
ANOTHER = [
    *((Place("KFACAdamW", at), {}, {"model": partial(Alike, "bac")}, SWAPPED) for at in (0, 2, 3)),
    (Place("AdamW"), {}, {"model": partial(Alike, "bac")}, SWAPPED),
    (Place("KFACAdamW"), excluding("layer_a"), excluding("layer_b"), OF_ANOTHER),
    (Place("KFACAdamW", 3), excluding("layer_a"), excluding("layer_b"), OF_ANOTHER),
    (Place("KFACAdamW", 3), excluding("layer_a"), excluding("layer_a"), ""),
    (Place("KFACAdamW"), excluding("layer_a"), excluding("layer_a", "layer_b"), OTHER_GROUPS),
    (Place("KFACAdamW", 3), excluding("layer_a"), excluding(), OTHER_GROUPS),
]


@pytest.mark.ranks(1)
def test_a_state_of_another_model_is_refused_also_where_its_sizes_fit(tmp_path):
    """Weights and moments were mixed up, without a word: DeepSpeed takes them by place."""
    for number, (place, saved, loaded, words) in enumerate(ANOTHER):
        first = engine_of(place, **{"model": Alike, **saved})
        train(first, 1, steps=1)
        first.save_checkpoint(f"{tmp_path}/{number}")
        second = engine_of(Place("KFACAdamW", place.stage), seed=9, **{"model": Alike, **loaded})
        said = error_of(partial(second.load_checkpoint, f"{tmp_path}/{number}"))
        assert words in said and bool(words) == bool(said), (place, loaded, said)
        assert "load_module_only=True" in said or not words
