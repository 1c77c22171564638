"""Forms of one training that give the same weights: compiled, with other defaults of torch, other
orders of dtypes, sparse gradients, other backends of operations, or rescaled by a known factor."""

import ast
import contextlib
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_kfac
from ds_kfac.ops import dispatch, functional
from ds_kfac.ops.dispatch import Backend
from tests.close import close, exact, near
from tests.deepspeed.features import ROWS, ConvNet, images, merged
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.runs import build, expected, micro_batches, patched, train, used, weights
from tests.deepspeed.said import error_of, heard
from tests.models import CLASSES, FEATURES, cross_entropy, make_net
from tests.ranks import on_rank_0
from tests.spread import difference, within

STEPS, CAPTURED = 7, (0, 3, 6)
INTERVALS = {"factor": {"update_interval": 3}, "eigenbasis": {"refresh_interval": 6}}
BLOCK = merged(KFAC, INTERVALS, {"burn_in": {"steps": 0}})


def counts() -> dict[str, int]:
    """Of graphs compiled, graph breaks and recompilations."""
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "recompiled": sum(counters["recompiles"].values()) + counters["recompile_limit"]["total"],
    }


def compiled(
    name: str, block: dict, backend: str | None
) -> tuple[dict, dict, list[dict[str, int]]]:
    """Initial and final weights with the factors, and the counts after each step and after two
    evaluations, the last of them captured."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, enabled = make_net(), block.get("enabled", True)
    if name == "z3":  # its own hooks break the graph: torch then fails on an in-place activation
        model.silu = torch.nn.SiLU()
    engine = build(BY_NAME[name], model=model, kfac=block)
    initial = weights(engine)
    if backend:
        engine.compile(backend=backend)
    history = []
    for step in range(STEPS):
        assert not enabled or engine.kfac.job.active == (step in CAPTURED)
        train(engine, 1, steps=1, first=step)
        history.append(counts())
    final = weights(engine)
    if enabled:
        kfac = engine.kfac.preconditioner
        final |= {key: state.packed_P for key, state in kfac.curvature.factors.items()}
        engine.eval()
        for _ in range(2):
            kfac.capture.active = not kfac.capture.active
            with torch.no_grad():
                x = torch.randn(4, 3, 13, dtype=engine.get_data_types()[0])
                engine(x, torch.zeros(4, 3, dtype=torch.long))
            history.append(counts())
    return initial, final, history


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "world"), [("z2-bf16", 1), ("adam-z2", 1), ("z3", 2)])
def test_compiled_training_is_the_same_in_the_graphs_of_the_plain_engine(name, world):
    *_, plain = compiled(name.removeprefix("adam-"), {"enabled": False}, "aot_eager")
    initial, eager, _ = compiled(name, BLOCK, None)
    _, actual, history = compiled(name, BLOCK, "aot_eager")
    options = {"steps": STEPS, "kfac_config": BLOCK}
    found = on_rank_0(lambda: expected(BY_NAME[name], 1, world, initial, **options))
    start = {key: torch.zeros_like(value) for key, value in eager.items()} | initial
    assert not within(name, difference(actual, eager, start), found.bound)
    assert history[0]["graphs"] == 0, "a captured step is not compiled"
    for key in ("graphs", "breaks", "recompiled"):
        assert history[STEPS - 1][key] == history[2][key], (key, history)
        # at stage 3 DeepSpeed breaks the graph itself, and more often in its first step, not
        # compiled here
        if name != "z3":
            assert history[2][key] == plain[2][key], (key, history, plain)
        elif key != "graphs":
            assert history[2][key] <= plain[2][key], (key, history, plain)
    assert name == "z3" or (plain[2]["graphs"], plain[2]["breaks"]) == (1, 0)
    assert history[STEPS]["graphs"] == history[STEPS + 1]["graphs"], "evaluation is compiled once"


@pytest.mark.ranks(1)
def test_a_compiled_function_may_call_the_engine():
    import torch._dynamo

    final = []
    for backend in (None, "eager"):
        torch._dynamo.reset()
        engine = build(BY_NAME["z0"])

        def take_step(x, y, engine=engine):
            engine.backward(engine(x, y))
            engine.step()

        run = take_step if backend is None else torch.compile(take_step, backend=backend)
        for step in range(STEPS):
            run(*next(micro_batches(step, 1)))
        assert engine.kfac.counters()["steps"] == STEPS
        final.append(weights(engine))
    exact(final[1], final[0])


def left_to_defaults(source: str) -> list[str]:
    """Calls that leave the dtype or the device of a new tensor to torch's defaults."""
    floating = {"zeros", "ones", "empty", "full", "eye", "rand", "randn", "linspace"}
    others = {"tensor", "as_tensor", "arange", "randint", "tril_indices", "triu_indices"}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            name, keys = node.func.attr, {keyword.arg for keyword in node.keywords}
            makes = name in floating | others and None not in keys
            if makes and not (
                keys & {"device", "pin_memory"} and (keys & {"dtype"} or name in others)
            ):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_every_new_tensor_says_its_dtype_and_its_device():
    assert len(left_to_defaults("torch.zeros(3, dtype=x)\ntorch.tensor(1.0)")) == 2
    folder = Path(ds_kfac.__file__).parent
    # a page to read, and examples of other people's models
    apart = {folder / "reference.py", folder / "estimate/models.py"}
    files = {path: left_to_defaults(path.read_text()) for path in {*folder.rglob("*.py")} - apart}
    assert not {path: lines for path, lines in files.items() if lines}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CHANGES = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
    "inference": contextlib.nullcontext,
}
DEFAULT_MODES = ["z0", "adam-z0", "adam-z3", "z2-bf16-corrected"]


def with_defaults(name: str, change: str = "") -> tuple[dict, tuple]:
    """Weights and factors after some steps, and what is said."""
    changed, model = CHANGES.get(change, contextlib.nullcontext), make_net()
    # DeepSpeed builds no engine of tensors on a device that holds none
    with changed() if change != "device" else contextlib.nullcontext():
        # at stage 0 DeepSpeed computes by what it clips in the default dtype, with any optimizer
        clip = {} if BY_NAME[name].stage else {"gradient_clipping": 0.0}
        engine = build(BY_NAME[name], 2, model=model, **clip)
    engine.kfac.detach()
    with changed(), heard():
        kfac = ds_kfac.attach(engine)
    for step in range(4):
        for x, y in micro_batches(step, 2):
            x = x.to(engine.get_data_types()[0])
            with changed():
                engine.backward(engine(x, y))
                with torch.inference_mode(change == "inference"):
                    engine.step()
    assert not kfac.preconditioner.proving.unfit
    with changed():
        said = kfac.explain("middle"), {k: float(v) for k, v in kfac.counters().items()}
    factors = kfac.preconditioner.curvature.factors.items()
    return weights(engine) | {key: state.packed_P for key, state in factors}, said


plain = cache(with_defaults)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", DEFAULT_MODES)
def test_a_program_s_defaults_change_nothing(mode, change):
    (actual, text), (expected, said) = with_defaults(mode, change), plain(mode)
    assert text == said
    exact(actual, expected)


NARROW = {"first": torch.bfloat16, "middle": torch.float32, "head": torch.float32}
WIDTHS = {"first": (FEATURES, 17), "middle": (17, 19), "head": (19, CLASSES)}


class Mixed(nn.Module):
    """Layers of their dtypes, registered in this order. Their values do not depend on it."""

    def __init__(self, dtypes: dict[str, torch.dtype], order: Iterable[str]) -> None:
        super().__init__()
        for name in order:
            torch.manual_seed(len(name))
            self.add_module(name, nn.Linear(*WIDTHS[name]).to(dtypes[name]))

    def forward(self, x, y):
        for name in WIDTHS:
            layer = self.get_submodule(name)
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return cross_entropy(x.float(), y)


def with_dtypes(mode: str, dtypes: dict, order: Iterable[str] = tuple(WIDTHS)) -> dict:
    """The parameters after training, with gradients that travel in fp32 where that is wanted."""
    engine = build(BY_NAME[mode], model=Mixed(dtypes, order), gradient_clipping=0.0)
    train(engine, 1, steps=3)
    kfac = engine.kfac.preconditioner
    assert not kfac.proving.unfit
    # else DeepSpeed adds up gradients in the first layer's dtype
    if not engine.zero_optimization() or dtypes is not NARROW:
        assert kfac.plan.gradient_dtypes == (torch.float32, torch.float32)
    return dict(engine.module.named_parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["z0", "adam-z0"])
def test_it_does_not_matter_of_which_dtype_the_first_layer_is(mode):
    """At stage 0 the optimizer steps parameters as they are; gradients travel in the widest dtype
    of any."""
    exact(with_dtypes(mode, NARROW), with_dtypes(mode, NARROW, ["middle", "head", "first"]))


@pytest.mark.ranks(2)
def test_results_of_a_float64_model_are_not_rounded_to_16_bits():
    with_dtypes("adam-z2", dict.fromkeys(WIDTHS, torch.float64))
    for mode in ("z2", "adam-z2"):
        with_dtypes(mode, NARROW)


# sparse gradients: at stage 0 DeepSpeed trains an nn.Embedding(sparse=True), but does not clip it

WORDS, TABLE_STEPS = 7, 3
TABLE_CLIP = 0.05
"""A part of these gradients' norms."""


class Table(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, 5, sparse=sparse)
        self.up, self.head = nn.Linear(5, 17), nn.Linear(17, CLASSES)

    def forward(self, x, y):
        return cross_entropy(self.head(torch.tanh(self.up(self.table(x)))), y)


def with_a_table(sparse: bool, clip: float) -> list[dict[str, torch.Tensor]]:
    """Weights after each step."""
    sgd = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}
    engine = build(Mode("z0", 0, clip=clip, inner=sgd), 2, model=Table(sparse=sparse))
    found = []
    for step in range(TABLE_STEPS):
        for x, y in micro_batches(step, 2):
            rows = (10 * x[..., 0]).long() % (WORDS - 1)  # some several times, the last one never
            engine.backward(engine(rows, y))
            engine.step()
        found.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    assert not engine.kfac.preconditioner.proving.unfit, "how much others were clipped is known"
    said = "it does not clip sparse gradients" in engine.kfac.report
    assert said == bool(sparse and clip)
    return found


@pytest.mark.ranks(2)
def test_a_sparse_gradient_trains_as_the_dense_one_and_is_not_clipped():
    plain, clipped = with_a_table(False, 0.0), with_a_table(False, TABLE_CLIP)
    table = plain[0]["table.weight"]
    assert (table - clipped[0]["table.weight"]).abs().max() > 1e-2, "dense ones are clipped"
    # what is not clipped goes another way afterwards
    expected = {**clipped[0], "table.weight": table}
    # three steps, each 1 / damping as sensitive as its factors
    for actual, wanted in (
        (with_a_table(True, 0.0)[-1], plain[-1]),
        (with_a_table(True, TABLE_CLIP)[0], expected),
    ):
        close(actual, wanted, sums=TABLE_STEPS * 100, condition=100)


# images


@pytest.mark.ranks(2)
def test_parameters_that_cannot_be_cut_are_refused():
    channels_last = make_net(ConvNet).to(memory_format=torch.channels_last)
    assert "stem.weight is not stored in the order of its shape" in error_of(
        lambda: build(BY_NAME["z0"], model=channels_last)
    )
    with_a_scalar = make_net(ConvNet)
    with_a_scalar.scale = nn.Parameter(torch.tensor(1.0))
    error = error_of(lambda: build(BY_NAME["z0"], model=with_a_scalar))
    assert "scale has no dimension" in error and "p.data.view(1)" in error


@pytest.mark.ranks(2)
def test_norms_that_begin_at_zero_are_warned_of_with_relative_damping():
    for kind in ("relative", "tikhonov"):
        model = make_net(ConvNet)
        nn.init.zeros_(model.norm.weight)
        kfac = {**KFAC, "damping": {"kind": kind, "value": 0.1}}
        report = build(BY_NAME["z2"], model=model, kfac=kfac).kfac.report
        warning = "WARNING: 1 norms begin with a weight of zero (norm, ..)"
        assert (warning in report) == (kind == "relative")


@pytest.mark.ranks(2)
def test_buffers_in_16_bits_train_in_channels_last():
    remedy = '"data_types": {"buffer_dtype": ...}'
    plain = build(BY_NAME["z2-bf16"], model=make_net(ConvNet)).kfac.report
    assert remedy in plain and "BatchNorm's running statistics differ between ranks" in plain
    assert "in 6 K-FAC layers (5 Conv2d, 1 ConvTranspose2d)" in plain
    buffers = {"data_types": {"buffer_dtype": "bf16"}}
    engine = build(BY_NAME["z2-bf16"], model=make_net(ConvNet), **buffers)
    assert remedy not in engine.kfac.report
    x, y = images(0, ROWS)
    x = x.to(torch.bfloat16).to(memory_format=torch.channels_last)
    for _ in range(3):
        engine.backward(engine(x, y))
        engine.step()
    assert all(bool(w.isfinite().all()) for w in weights(engine).values())
    assert not float(engine.kfac.metrics.summary.sum())


@contextlib.contextmanager
def offered(load):
    """Each rank checks for itself."""
    with (
        patch.dict(dispatch.BACKENDS, {"cuda": Backend("cpu", load)}),
        patch.dict("os.environ", TORCH_EXTENSIONS_DIR=tempfile.mkdtemp()),
    ):
        yield


def start(backend: str | None = None):
    mode = BY_NAME["z2"]
    return build(mode, kfac=merged(mode.kfac_block, {"ops": {"backend": backend}}))


@pytest.mark.ranks(2)
def test_training_is_the_same_by_either_backend_and_the_report_names_it():
    with offered(lambda: {"ema_update_": functional.ema_update_}):
        engines = [start("torch"), start("cuda")]
    for engine in engines:
        train(engine, 1, steps=4)
    exact(*map(weights, engines))
    by_torch, by_cuda = (engine.kfac.report for engine in engines)
    assert "  ops: torch (syrk_accumulate_, " in by_torch and "cuda" not in by_torch
    assert "  ops: torch (" in by_cuda and "; cuda (ema_update_)" in by_cuda


@pytest.mark.ranks(2)
def test_a_backend_that_one_rank_lacks_is_chosen_on_none_and_refused_on_all():
    def broken() -> dict:
        if dist.get_rank() == 1:
            raise RuntimeError("no compiler on this node")
        return {"ema_update_": functional.ema_update_}

    with offered(broken):
        report = start().kfac.report
        error = error_of(lambda: start("cuda"))
    assert "  ops: torch (syrk_accumulate_, " in report
    assert dist.get_rank() or "not cuda: rank 1: no compiler on this node" in report
    assert "rank 1: ValueError: kfac.ops.backend" in error and "no compiler on this node" in error


@pytest.mark.ranks(2)
def test_an_op_that_is_wrong_on_one_rank_is_torch_s_on_all_with_one_warning():
    def wrong(*arguments, **options):
        functional.adam_step_(*arguments, **options)
        if dist.get_rank() == 1:
            arguments[0].mul_(2)

    ops = {"ema_update_": functional.ema_update_, "adam_step_": wrong}
    with offered(lambda: ops), heard() as said:
        report = start().kfac.report
    assert "  ops: torch (" in report and "; cuda (ema_update_); not adam_step_: " in report
    warnings = [text for text in said if "plain torch runs instead" in text]
    assert len(warnings) == (dist.get_rank() == 0)
    off = "rank 1: adam_step_ by cuda is wrong: off by 1.0e+00 of the largest value"
    assert all(f"on all ranks: {off}" in text for text in warnings)


RESCALED_MODES = (
    "z0 z1 z2-round_robin z2-offload z3-persistence_0 z3-sub_groups z3-offload z0-bf16 "
    "z0-bf16-fused z1-bf16-accum32 z2-bf16 z3-bf16 adam-z2"
)
RESCALE = {**KFAC, "rescale_weights": True}
WEIGHTS = ("first.weight", "middle.weight", "head.weight")


def wide_net():
    """Two layers' weights are larger than the rule leaves them."""
    model = make_net()
    with torch.no_grad():
        for layer in (model.first, model.middle):
            layer.weight.mul_(5)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", RESCALED_MODES.split())
def test_every_stage_rescales_masters_and_weights(name):
    mode = BY_NAME[name]
    block = {**KFAC, **mode.kfac}
    plain, rescaling = (build(mode, model=wide_net(), kfac=k) for k in (block, RESCALE | mode.kfac))
    with patched(mode):
        for engine in (plain, rescaling):
            train(engine, 1, steps=1)
        rescaled, parameters, factors = weights(rescaling), used(rescaling), []
        train(rescaling, 1, steps=3, first=1)
        later = weights(rescaling)
    wide = mode.dtype == "fp32"
    for key, weight in weights(plain).items():
        limit = (2 * len(weight)) ** 0.5
        factor = min(1.0, limit / (float(weight.norm()) + 1e-9)) if key in WEIGHTS else 1.0
        factors.append(factor)
        if wide:
            close(rescaled[key], factor * weight, sums=weight.numel(), what=key)
        else:
            why = "the norm of the rounded weight"
            near(rescaled[key], factor * weight, 1e-3 * weight.abs(), why, what=key)
        ulp = (0 if wide else 2**-7) * rescaled[key].abs() + 1e-7
        near(parameters[key].float(), rescaled[key], ulp, "rounding to 16 bits", what=key)
        assert key not in WEIGHTS or float(later[key].norm()) <= limit * 1.001
    assert min(factors) < 0.9, "nothing shrinks, so nothing is tested"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["z0", "z2"])
def test_a_weight_that_was_frozen_after_attach_keeps_its_norm(name):
    # ZeRO applies weight decay to a parameter that was frozen
    sgd = {"type": "SGD", "params": {"lr": 0.02}}
    engine = build(BY_NAME[name], model=wide_net(), kfac=RESCALE, optimizer=sgd)
    before = weights(engine)["middle.weight"]
    engine.module.middle.weight.requires_grad_(False)
    train(engine, 1, steps=1)
    exact(weights(engine)["middle.weight"], before)


@pytest.mark.ranks(1)
def test_layers_without_a_matrix_are_trained_without_rescaling():
    engine = build(BY_NAME["z2"], kfac={**RESCALE, "layers": {"types": ["LayerNorm"]}})
    train(engine, 1, steps=2)
    assert engine.kfac.job.steps == 2
