"""A program may change what torch takes where nothing is said: the dtype and the device of new
tensors, and whether they are inference tensors. What K-FAC computes does not change with it."""

import ast
import contextlib
from functools import cache
from pathlib import Path

import pytest
import torch

import ds_kfac
from tests.close import exact
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches, weights
from tests.deepspeed.said import heard
from tests.models import make_net

FLOATING = {"zeros", "ones", "empty", "full", "eye", "rand", "randn", "linspace"}
"""Functions that make tensors of the default dtype."""
OTHERS = {"tensor", "as_tensor", "arange", "randint", "tril_indices", "triu_indices"}
"""Their dtype is that of what they are given, if it is integers; their device is the default one,
too."""
APART = {"reference.py", "estimate/models.py"}
"""A page to read, and examples of other people's models."""


def unsaid(source: str) -> list[str]:
    """Calls that leave the dtype or the device of a new tensor to torch's defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, keys = node.func.attr, {keyword.arg for keyword in node.keywords}
        if ast.unparse(node.func.value) != "torch" or None in keys or name not in FLOATING | OTHERS:
            continue
        said = {"dtype"} <= keys or name not in FLOATING
        if not said or not keys & {"device", "pin_memory"}:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_every_new_tensor_says_its_dtype_and_its_device():
    assert len(unsaid("torch.zeros(3, dtype=x)\ntorch.tensor(1.0)\ntorch.ones(3, device=x)")) == 3
    folder = Path(ds_kfac.__file__).parent
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.py")}
    wrong = {name: unsaid(path.read_text()) for name, path in files.items() if name not in APART}
    assert not {name: lines for name, lines in wrong.items() if lines}


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
MODES = ["z0", "z2", "adam-z0", "adam-z2", "adam-z3", "z2-bf16-corrected"]


def trained(name: str, change: str = "") -> tuple[dict, tuple]:
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


plain = cache(trained)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_a_program_s_defaults_change_nothing(mode, change):
    (actual, text), (expected, said) = trained(mode, change), plain(mode)
    assert text == said
    exact(actual, expected)
