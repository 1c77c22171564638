"""Eigenbases of factors: right and orthogonal, alone and in stacks, in fp32 or by their fallbacks;
what changes with them."""

import pytest
import torch

from ds_kfac.curvature import eigen
from ds_kfac.curvature.eigen import Refreshed, Request, eigh, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor, Side
from tests.close import close, exact
from tests.curvature.one_factor import SIDES, dense_matrix, dense_vectors, random_factor, refresh

MIXED = [*SIDES, Side.dense(63), Side.dense(2), Side.dense(257), Side(257, 64), Side.dense(20)]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])


def mixed(device: str = "cpu") -> list[KroneckerFactor]:
    return [random_factor(side, i, decades=2, device=device) for i, side in enumerate(MIXED)]


def assert_solved(kept: KroneckerFactor, found: Refreshed) -> None:
    """Into a tridiagonal matrix, its eigenvectors and back: four sums over a side."""
    values, C = found.basis.values.double().cpu(), dense_matrix(kept).cpu()
    Q, terms = dense_vectors(found.basis).cpu(), {"sums": 4 * kept.side.dim, "dtype": torch.float32}
    close(Q @ torch.diag(values) @ Q.T, C, **terms)
    close(Q.T @ Q, torch.eye(len(Q)), **terms)


def test_values_are_not_negative():
    # rank deficient: rounding makes some slightly negative
    assert refresh(random_factor(Side.dense(40), rows=3)).basis.values.min() >= 0


# --- which together ---


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Stacks of up to 64."""
    monkeypatch.setattr(eigen, "GROUPED", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(eigen, "BATCHED_UP_TO", 64)


def test_on_a_cpu_a_result_does_not_depend_on_what_else_is_refreshed():
    for kept, found in zip(mixed(), refresh_all([*map(Request, mixed())]), strict=True):
        exact((found.basis.vectors, found.basis.values), (*vars(refresh(kept).basis).values(),))
        if kept.side.block > 1:
            plain = [eigh(group) for group in kept.side.blocks(kept.packed_P)]
            exact(list(found.basis.vectors), [vectors for _, vectors in plain])


def test_stacks_give_what_single_calls_give(as_on_a_gpu, monkeypatch):
    shapes = []

    def watched(stack):
        shapes.append(tuple(stack.shape[:2]))
        assert not torch.is_grad_enabled()
        return eigh(stack)

    monkeypatch.setattr(eigen, "eigh", watched)
    with torch.no_grad():
        found = refresh_all([*map(Request, mixed())])
    assert len(shapes) == len(set(shapes)) and {(2, 63), (33, 2), (4, 20), (4, 64)} <= {*shapes}
    for kept, result in zip(mixed(), found, strict=True):
        assert_solved(kept, result)
        assert result.retries == 0
        for tensor in (*result.basis.vectors, result.basis.values):
            # a view would keep others' results alive
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_on_a_gpu_mixed_sizes_are_right_the_same_bits_again_and_hold_no_input():
    """Their inputs are dropped at once and written over."""
    first = refresh_all([*map(Request, mixed("cuda"))])
    junk = [torch.full((700, 700), torch.nan, device="cuda") for _ in range(20)]
    second = refresh_all([*map(Request, mixed("cuda"))])
    assert len(junk) == 20
    for kept, one, other in zip(mixed(), first, second, strict=True):
        assert_solved(kept, one)
        exact(list(one.basis.vectors), list(other.basis.vectors))


# --- failures ---


def breaking(how: str, bad: torch.Tensor):
    """eigh that fails in fp32, or always, for stacks with that block in them."""

    def method(stack):
        values, vectors = eigh(stack)
        if stack.shape[1:] == bad.shape and (stack.dtype == torch.float32 or how == "always"):
            hit = (stack.float() == bad).flatten(1).all(-1)
            if how in ("raises", "always") and hit.any():
                raise torch.linalg.LinAlgError("did not converge")
            wrong = torch.nan if how == "nan" else vectors * 1.01
            vectors = torch.where(hit[:, None, None], wrong, vectors)
        return values, vectors

    return method


@DEVICES
@pytest.mark.parametrize("how", ["raises", "nan", "not orthogonal", "always"])
def test_a_failure_is_retried_in_float64_and_spoils_no_other(as_on_a_gpu, monkeypatch, how, device):
    side = Side.dense(20)
    factors = [random_factor(side, seed, decades=2, device=device) for seed in range(4)]
    (bad,) = side.blocks(factors[2].packed_P)[0]
    monkeypatch.setattr(eigen, "eigh", breaking(how, bad))
    found = refresh_all([*map(Request, factors)])
    assert [result.retries for result in found] == [0, 0, 2 if how == "always" else 1, 0]
    for kept, result in zip(factors, found, strict=True):
        if how == "always" and result is found[2]:
            assert result == Refreshed(None, "failed", 2)
        else:
            assert result.how == "eigh" and result.basis.vectors[0].dtype == torch.float32
            assert_solved(kept, result)
