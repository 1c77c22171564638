"""Factors that are refreshed together: on a CPU as if alone, in stacks and lanes as right as alone."""

import threading
from functools import partial

import pytest
import torch

from ds_kfac.curvature import eigenbasis, eigensolver
from ds_kfac.curvature import solver_batches as eigen_rounds
from ds_kfac.curvature.eigenbasis import Eigenbasis, Request, eigh, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.curvature.side import Side
from ds_kfac.curvature.solver_batches import rounds
from ds_kfac.step.background import Refresher
from ds_kfac.step.factor_state import FactorState
from tests.close import close, near
from tests.curvature.one_factor import refresh
from tests.curvature.test_orthogonal_iteration import Products
from tests.oracle import _eigh

SIDES = [
    Side.dense(63), Side.dense(1), Side.dense(129), Side(63, 20), Side.dense(2), Side.identity(5), Side.dense(63),
    Side.diagonal(9), Side(64, 2), Side.dense(257), Side(257, 64), Side.dense(20), Side.dense(129),
]  # fmt: skip
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def factor(side: Side, seed: int, device: str = "cpu") -> KroneckerFactor:
    x = torch.randn(2 * side.dim, side.dim, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(0, -2, side.dim)  # eigenvalues well apart
    kept = KroneckerFactor(side, side.accumulate_(torch.zeros(side.numel), x) / len(x), torch.ones(()))
    return KroneckerFactor(side, kept.packed_P.to(device), kept.updates.to(device))


def matrix(kept: KroneckerFactor) -> torch.Tensor:
    blocks = [block for group in kept.side.blocks(kept.packed_P) for block in group]
    return torch.block_diag(*blocks).double() if blocks else torch.eye(kept.side.dim, dtype=torch.float64)


def dense_vectors(basis: Eigenbasis) -> torch.Tensor:
    return basis.restore(torch.eye(len(basis.values), device=basis.values.device)).double()


def residual(kept: KroneckerFactor, basis: Eigenbasis) -> float:
    """In float64: how far Q diag(values) Q^T is from C and Q from orthogonal, relatively."""
    Q, C = dense_vectors(basis), matrix(kept).to(basis.values.device)
    wrong = (C - Q @ torch.diag(basis.values.double()) @ Q.T).norm() / C.norm()
    return max(float(wrong), float((Q.T @ Q - torch.eye(len(Q), device=Q.device)).norm()) / len(Q) ** 0.5)


QR_STEP = 1e-4
"""What a step leaves of the residual: it is no exact decomposition, a wrong one is 1e-2 or more."""


def assert_solved(kept: KroneckerFactor, basis: Eigenbasis) -> None:
    """Into a tridiagonal matrix, its eigenvectors and back: four sums over a side."""
    close(residual(kept, basis), 0.0, scale=1.0, sums=4 * kept.side.block, dtype=torch.float32)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Stacks of up to 64, lanes for what is wider."""
    monkeypatch.setattr(eigensolver, "GROUPED", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(eigen_rounds, "STACKED_UP_TO", 64)


# --- which together, which at the same time ---


def spread(shapes, iterates=None, **limits):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(eigen_rounds, name, value)
        found = rounds(shapes, iterates or [False] * len(shapes))
    calls = [call for lanes in found for lane in lanes for call in lane]
    assert sorted(index for call in calls for index in call) == list(range(len(shapes))), "each once"
    return found, calls


def test_small_ones_of_one_width_and_kind_share_a_call():
    shapes = [(1, 512), (1, 64), (3, 64), (1, 513), (1, 513), (1, 512), (2, 63), (1, 64)]
    _, calls = spread(shapes, [False] * 7 + [True])
    assert sorted(calls) == [(0, 5), (1, 2), (3,), (4,), (6,), (7,)]


def test_the_work_is_spread_over_lanes_heaviest_first():
    (lanes,), _ = spread([(1, 1000), (1, 4000), (1, 2000), (1, 3000), (1, 1500), (1, 4000)])
    assert lanes == (((1,),), ((5,),), ((3,),), ((2,), (4,), (0,)))
    assert len(spread([(1, 600)] * 3)[0][0]) == 3 and spread([])[0] == []


def test_stacks_and_rounds_end_where_memory_does():
    found, calls = spread([(1, 10)] * 5 + [(30, 10)], STACK_NUMEL=200)
    assert sorted(calls) == [(0, 1), (2, 3), (4,), (5,)], "one that is too large by itself is not cut"
    found, _ = spread([(1, 600)] * 5 + [(1, 900)], ROUND_NUMEL=2 * 600**2)
    assert [sum(len(call) for lane in lanes for call in lane) for lanes in found] == [1, 2, 2, 1]


# --- results ---


def test_on_a_cpu_a_result_does_not_depend_on_what_else_is_refreshed():
    factors = [factor(side, seed) for seed, side in enumerate(SIDES)]
    together = refresh_all([Request(kept) for kept in factors])
    for kept, found in zip(factors, together, strict=True):
        alone = refresh(kept)
        plain = [eigenbasis.eigh(group) for group in kept.side.blocks(kept.packed_P)] if kept.side.block > 1 else []
        assert found.how == alone.how == ("eigh" if plain else "diagonal") and found.retries == 0
        assert torch.equal(found.basis.values, alone.basis.values)
        for (values, vectors), ours, others in zip(plain, found.basis.vectors, alone.basis.vectors, strict=True):
            assert (
                torch.equal(vectors, ours)
                and torch.equal(ours, others)
                and torch.isin(values, found.basis.values).all()
            )


def test_stacks_and_lanes_give_what_single_calls_give(as_on_a_gpu, monkeypatch):
    shapes, threads, meet = [], set(), threading.Barrier(2, timeout=20)

    def watched(stack):
        shapes.append(tuple(stack.shape[:2]))
        if stack.shape[1] == 129:  # two of them: each waits for the other, so they must run at the same time
            meet.wait()
            threads.add(threading.get_ident())
        assert not torch.is_grad_enabled()
        return eigh(stack)

    monkeypatch.setattr(eigenbasis, "eigh", watched)
    factors = [factor(side, seed) for seed, side in enumerate(SIDES)]
    with torch.no_grad():
        found = refresh_all([Request(kept) for kept in factors])
    assert sorted(shapes) == [(1, 1), (1, 3), (1, 129), (1, 129), (1, 257), (2, 63), (4, 20), (4, 64), (33, 2)]
    assert len(threads) == 2
    for kept, result in zip(factors, found, strict=True):
        assert_solved(kept, result.basis)
        assert result.retries == 0
        for tensor in (*result.basis.vectors, result.basis.values):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a view would keep others' results alive"


def breaking(how: str, bad: torch.Tensor):
    """eigh that fails in fp32 for stacks with that block in them."""

    def method(stack):
        values, vectors = eigh(stack)
        if stack.dtype == torch.float32 and stack.shape[1:] == bad.shape:
            hit = (stack == bad).flatten(1).all(-1)
            if how == "raises" and hit.any():
                raise torch.linalg.LinAlgError("did not converge")
            vectors = torch.where(hit[:, None, None], torch.nan if how == "nan" else vectors * 1.01, vectors)
        return values, vectors

    return method


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("how", ["raises", "nan", "not orthogonal"])
def test_a_bad_factor_spoils_no_other(as_on_a_gpu, monkeypatch, how, device):
    factors = [factor(Side.dense(20), seed, device) for seed in range(4)]
    (bad,) = factors[2].side.blocks(factors[2].packed_P)[0]
    monkeypatch.setattr(eigenbasis, "eigh", breaking(how, bad))
    found = refresh_all([Request(kept) for kept in factors])
    assert [result.retries for result in found] == [0, 0, 1, 0] and {result.how for result in found} == {"eigh"}
    for kept, result in zip(factors, found, strict=True):
        assert_solved(kept, result.basis)


def test_without_any_way_a_factor_has_no_basis_and_the_others_have(as_on_a_gpu, monkeypatch):
    def method(stack):
        if (stack.diagonal(dim1=-2, dim2=-1).sum(-1) > 1e6).any():
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(stack)

    monkeypatch.setattr(eigenbasis, "eigh", method)
    factors = [factor(Side.dense(20), seed) for seed in range(3)]
    factors[1] = KroneckerFactor(factors[1].side, 1e8 * factors[1].packed_P, factors[1].updates)
    found = refresh_all([Request(kept) for kept in factors])
    assert [result.how for result in found] == ["eigh", "failed", "eigh"] and found[1].retries == 2


# --- QR steps between exact refreshes ---


def next_state(state: FactorState, kept: KroneckerFactor) -> tuple[FactorState, str]:
    (result,) = refresh_all([Request(kept, state.basis, state.qr_steps)], exact_every=3)
    return state.refreshed(result), result.how


@pytest.mark.parametrize("side", [Side.dense(63), Side(63, 20), Side(64, 2), Side(257, 64)], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_one_refresh_in_three_is_exact_and_steps_follow_the_reference(side, stacked, request):
    if stacked:
        request.getfixturevalue("as_on_a_gpu")
    state, seen = FactorState(factor(side, 0)), []
    for turn in range(7):
        kept, old = factor(side, turn // 2), state.basis
        state, how = next_state(state, kept)
        seen.append(how)
        if how == "eigh":
            assert_solved(kept, state.basis)
            continue
        values, Q = _eigh(matrix(kept), side.block, (old.values.double(), dense_vectors(old)))
        near(
            state.basis.values,
            values,
            1e-3 * values + 1e-5,
            "the step is in fp32, its reference in float64 from vectors of the step before",
        )
        overlap = (dense_vectors(state.basis).T @ Q).abs().diagonal()
        assert float(overlap.min()) > 0.99, "the same vectors at the same places"
    assert seen == ["eigh", "qr", "qr", "eigh", "qr", "qr", "eigh"] and state.qr_steps == 0


def test_a_step_that_fails_becomes_exact(as_on_a_gpu):
    kept = factor(Side.dense(20), 0)
    good = refresh(kept).basis
    broken = Eigenbasis((good.vectors[0] * torch.nan,), good.values)
    stacked = refresh_all([Request(kept, good), Request(kept, broken), Request(kept, good, 2)], exact_every=3)
    assert [(result.how, result.retries) for result in stacked] == [("qr", 0), ("eigh", 1), ("eigh", 0)]
    for result in stacked:
        assert residual(kept, result.basis) < QR_STEP


def test_a_state_counts_its_own_steps_and_is_replaced():
    kept = factor(Side.dense(20), 0)
    state, _ = next_state(FactorState(kept), kept)
    after, how = next_state(state, kept)
    assert (state.qr_steps, after.qr_steps, how) == (0, 1, "qr")
    assert next_state(state, kept)[0].qr_steps == 1, "a skipped step's is dropped"


@pytest.mark.parametrize(("precision", "dtype"), [("highest", torch.float32), ("high", torch.float64)])
def test_a_step_s_products_are_exact_whatever_the_process_allows(precision, dtype):
    """ "high" is TF32 on a GPU, bf16 on some CPUs; and a user may be under autocast."""
    kept, before = factor(Side.dense(129), 0), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with Products() as products, torch.autocast("cpu"):
            (result,) = refresh_all([Request(kept, refresh(kept).basis)], exact_every=3)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_solved(kept, result.basis)
    assert result.how == "qr"
    assert products.dtypes == [(dtype, dtype)] * 2


# --- asynchronously ---


def test_keys_submitted_together_are_worked_out_once_and_read_one_by_one():
    refresher, calls = Refresher("cpu"), []

    def work():
        calls.append(threading.get_ident())
        return [1, 2, 3]

    refresher.submit_together(["a", "b", "c"], work)
    assert refresher.pending == ("a", "b", "c")
    refresher.drop(["a"])
    assert refresher.result("c") == 3 and refresher.result("b") == 2 and len(calls) == 1
    refresher.submit_together([], work)
    refresher.close()


def check_on(device: str, refresher: Refresher | None) -> None:
    """Results of mixed sizes, their inputs dropped at once and written over."""
    large = (700, 1025, 600, 513) if device == "cuda" else (200, 130)
    sides = [*SIDES, *map(Side.dense, large)]
    for every, hows in ((1, {"eigh"}), (3, {"qr"})):
        originals = [factor(side, seed) for seed, side in enumerate(sides)]
        given = [factor(side, seed, device) for seed, side in enumerate(sides)]
        bases = [refresh(kept).basis for kept in given] if every > 1 else [None] * len(given)
        dues = [Request(kept, basis) for kept, basis in zip(given, bases, strict=True)]
        work = partial(refresh_all, dues, exact_every=every)
        if refresher is None:
            found = work()
        else:
            keys = [str(index) for index in range(len(dues))]
            refresher.submit_together(keys, work)
            found = [refresher.result(key) for key in keys]
            refresher.drop(keys)
        del given, bases, dues, work
        junk = [torch.full((700, 700), torch.nan, device=device) for _ in range(20)]
        assert {result.how for result in found} == hows | {"diagonal"}
        assert max(residual(kept, r.basis) for kept, r in zip(originals, found, strict=True)) < QR_STEP
        assert sum(result.retries for result in found) == 0 and len(junk) == 20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_mixed_sizes_asynchronously_and_in_the_step(device, asynchronous, as_on_a_gpu):
    refresher: Refresher | None = Refresher(device) if asynchronous else None
    with torch.no_grad():
        check_on(device, refresher)
    if refresher is not None:
        refresher.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_same_factors_together_give_the_same_bits():
    dues = [
        Request(factor(side, seed, "cuda")) for seed, side in enumerate([*SIDES, Side.dense(700), Side.dense(1025)])
    ]
    first, second = refresh_all(dues), refresh_all(dues)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.basis.vectors, other.basis.vectors, strict=True))
