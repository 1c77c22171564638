"""Eigenbases of factors: right and orthogonal, alone and in stacks, by eigh, its fallbacks or a
step of orthogonal iteration, whose guards refuse wrong ones. tests/deepspeed/test_features.py
compares the iteration with the oracle's."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.curvature import eigen, iteration
from ds_kfac.curvature.eigen import Refreshed, Request, eigh, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.iteration import EPS, orthogonal_iteration, refresh_from_last
from tests.close import close, exact, near
from tests.curvature.one_factor import SIDES, dense_matrix, dense_vectors, random_factor, refresh
from tests.ops.specification import symmetric_pack

MIXED = [*SIDES, Side.dense(63), Side.dense(2), Side.dense(257), Side(257, 64), Side.dense(20)]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


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


@pytest.mark.gpu
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


# --- a step of orthogonal iteration ---

WIDTHS = (1, 2, 3, 63, 130)


def orthogonal(width: int, seed: int = 5) -> torch.Tensor:
    x = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(x.double())[0].float()


def turned(C: torch.Tensor, seed: int = 5) -> torch.Tensor:
    U = orthogonal(len(C), seed).double()
    return (U @ C.double() @ U.T).float()


def second_moment(
    width: int, decades: float, *, rows: int = 0, seed: int = 1, turn: int = 5
) -> torch.Tensor:
    """Of ``rows`` rows, 3 a side if not said, whose root mean squares fall over so many decades."""
    x = torch.randn(rows or 3 * width, width, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(0, -decades, width)
    return turned(x.T @ x / len(x), turn)


def off(C: torch.Tensor, Q: torch.Tensor) -> float:
    B = Q.double().T @ C.double() @ Q.double()
    return float((B - B.diagonal().diag()).norm() / (C.double().norm() or 1.0))


def cases(width: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Factor, and the last eigenvectors."""

    def moved(decades: float, rows: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        before, other = (second_moment(width, decades, rows=rows, seed=seed) for seed in (1, 2))
        return 0.8 * before + 0.2 * other, torch.linalg.eigh(before)[1]

    cluster = torch.eye(width)
    cluster[: width // 2] *= 1e-3
    found = {
        "moved": moved(0.5),
        "steep": moved(2),
        "few rows": moved(1, max(1, width // 3)),
        "clusters": (turned(cluster), orthogonal(width)),
        "zero": (torch.zeros(width, width), orthogonal(width)),
        "as it was": (second_moment(width, 0.5), moved(0.5)[1]),
    }
    C, Q = found["moved"]
    return found | {
        "a basis of 16 bits": (C, Q.bfloat16().float()),
        "tiny": (1e-20 * C, Q),
        "huge": (1e16 * C, Q),
    }


NAMES = list(cases(1))


def iterated(C: torch.Tensor, Q: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Values, vectors, and whether they can be used."""
    return [part[0].cpu() for part in orthogonal_iteration(C[None].to(device), Q[None].to(device))]


@DEVICES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_gives_an_orthogonal_basis_with_its_own_values(name, width, device):
    C, Q = cases(width)[name]
    values, vectors, right = iterated(C, Q, device)
    assert right and torch.equal(values, values.sort().values) and values.min() >= 0
    strayed = (vectors.double().T @ vectors.double() - torch.eye(width)).abs().max()
    near(strayed, 0.0, eigen.TOLERANCE, "two passes of Cholesky-QR where Z is nearly singular")
    own = ((C.double() @ vectors.double()) * vectors.double()).sum(0).clamp(min=0)
    terms = {"sums": 2 * width, "scale": float(C.double().norm()), "dtype": torch.float32}
    close(values, own, **terms)
    assert off(C, vectors) <= off(C, Q) + width * EPS, "a step never leaves more off the diagonal"


def test_what_stays_off_the_diagonal_is_refused(monkeypatch):
    C, Q = cases(63)["moved"]
    left = off(C, orthogonal_iteration(C[None], Q[None])[1][0])
    for part, accepted in ((0.9, False), (1.1, True)):
        monkeypatch.setattr(iteration, "OFF", part * left)
        assert bool(orthogonal_iteration(C[None], Q[None])[2]) is accepted


@pytest.mark.parametrize("where", ["C", "Q"])
def test_a_value_that_is_not_finite_is_refused_and_spoils_no_other(where):
    pairs = [cases(20)[name] for name in ("moved", "steep", "moved")]
    C, Q = (torch.stack([pair[index] for pair in pairs]) for index in (0, 1))
    (C if where == "C" else Q)[1, 3, 3] = torch.nan
    values, _, right = orthogonal_iteration(C, Q)
    assert right.tolist() == [True, False, True] and values[[0, 2]].isfinite().all()


# --- factors ---


def requests() -> list[Request]:
    """Factors of mixed sides that have moved, with their last bases."""
    lasts = refresh_all([*map(Request, mixed())])
    asked = []
    for seed, (kept, last) in enumerate(zip(mixed(), lasts, strict=True)):
        other = random_factor(kept.side, 100 + seed, decades=2)
        moved = replace(kept, packed_P=0.9 * kept.packed_P + 0.1 * other.packed_P)
        asked.append(Request(moved, last=last.basis))
    return asked


@pytest.mark.parametrize("how", ["eigh", "iteration"])
def test_blocks_of_one_width_are_decomposed_together_and_as_well_as_alone(
    as_on_a_gpu, monkeypatch, how
):
    module, name = (eigen, "eigh") if how == "eigh" else (iteration, "orthogonal_iteration")
    decompose, shapes, asked = getattr(module, name), [], requests()

    def watched(C_nbb, *Q_nbb):
        shapes.append(tuple(C_nbb.shape[:2]))
        return decompose(C_nbb, *Q_nbb)

    monkeypatch.setattr(module, name, watched)
    if how == "eigh":
        found = refresh_all([Request(request.factor) for request in asked])
    else:
        found = refresh_from_last(asked)
    assert len(shapes) == len(set(shapes)) and {(2, 63), (33, 2), (4, 20), (4, 64)} <= {*shapes}
    for request, result in zip(asked, found, strict=True):
        side, Q = request.factor.side, dense_vectors(result.basis)
        assert result.how in (how, "diagonal") and result.retries == 0
        if how == "eigh":
            assert_solved(request.factor, result)
        else:
            (alone,) = refresh_from_last([replace(request, alone=True)])
            close(alone.basis.values, result.basis.values, sums=8 * max(1, side.block))
            strayed = (Q.T @ Q - torch.eye(side.dim)).abs().max()
            near(strayed, 0.0, eigen.TOLERANCE, "see orthogonal_iteration")
            assert not side.block or off(dense_matrix(request.factor), Q) < iteration.OFF
        for tensor in (*result.basis.vectors, result.basis.values):
            # a view would keep others' results alive
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_one_with_copies_elsewhere_has_the_same_bits_whatever_is_beside_it(as_on_a_gpu):
    alike = [request for request in requests() if request.factor.side == Side.dense(63)]
    first, *others = alike * 2
    copy = replace(first, alone=True)
    (by_itself,), (beside, *_) = refresh_from_last([copy]), refresh_from_last([copy, *others])
    assert torch.equal(by_itself.basis.vectors[0], beside.basis.vectors[0])


def test_eigh_takes_what_has_no_last_basis_or_is_refused_and_says_so(as_on_a_gpu):
    side = Side.dense(63)
    by_side = {request.factor.side: request for request in requests()}
    usual, other = by_side[side], by_side[Side(63, 20)]
    fresh = Request(random_factor(side, 50, decades=2))
    few = [second_moment(63, 2, rows=21, seed=seed, turn=turn) for seed, turn in ((1, 5), (3, 8))]
    kept = [KroneckerFactor(side, symmetric_pack(C), torch.ones(())) for C in few]
    jumped = Request(kept[1], last=refresh_all([Request(kept[0])])[0].basis)
    strange = replace(fresh, last=other.last)  # of another block
    found = refresh_from_last([usual, fresh, jumped, strange])
    assert [result.how for result in found] == ["iteration", "eigh", "eigh", "eigh"]
    assert [result.retries for result in found] == [0, 0, 1, 0]
    exact = refresh_all([fresh, jumped, strange])
    for ours, expected in zip(found[1:], exact, strict=True):
        assert torch.equal(ours.basis.values, expected.basis.values)
