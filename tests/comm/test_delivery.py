"""Eigenbases from the ranks that decompose to the gradient workers; ranks are threads here."""

from functools import cache

import pytest
import torch

from ds_kfac.assignment.costs import FactorSpec
from ds_kfac.comm.message import deliver
from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.inverse import packed, refresh_inverse
from ds_kfac.curvature.methods import EIGEN, METHODS
from ds_kfac.step.messages import Delivery
from tests.comm.fake_network import FakeNetwork
from tests.curvature.one_factor import fold, refresh

CPU = torch.device("cpu")
SIDES = {"dense": Side.dense(7), "blocks": Side(9, 4), "diagonal": Side.diagonal(5)}
FACTORS = [
    FactorSpec(f"{name}/{which}", side, (name,)) for name, side in SIDES.items() for which in "AG"
]
EIGEN_WORKERS = {
    "dense/A": 0,
    "dense/G": 1,
    "blocks/A": 2,
    "blocks/G": 2,
    "diagonal/A": 1,
    "diagonal/G": 0,
}
WORKERS = {"dense": (0, 2), "blocks": (1, 3), "diagonal": (0, 2)}


def delivery(wire: torch.dtype = torch.float32, **changes) -> Delivery:
    options = {
        "factors": FACTORS,
        "eigen_workers": EIGEN_WORKERS,
        "workers": WORKERS,
        "world": 4,
        "nbytes": 1 << 20,
    }
    options |= changes
    return Delivery(**options, wire=wire)


def factor_of(key: str) -> KroneckerFactor:
    """A random one, the same in every thread."""
    side = next(factor.side for factor in FACTORS if factor.key == key)
    rows = torch.randn(
        20, side.dim, generator=torch.Generator().manual_seed(len(key) + ord(key[0]) + ord(key[-1]))
    )
    total = side.accumulate_(torch.zeros(side.numel), rows)
    return fold(KroneckerFactor.empty(side), total, torch.tensor(20.0), decay=0.9)


@cache  # with SHUFFLED_SUMS each call sums in another order
def basis(key: str) -> Eigenbasis:
    """Of :func:`factor_of`."""
    found = refresh(factor_of(key)).basis
    assert found is not None
    return found


def equal(a: Eigenbasis, b: Eigenbasis) -> bool:
    return len(a.vectors) == len(b.vectors) and all(
        torch.equal(x, y)
        for x, y in zip((*a.vectors, a.values), (*b.vectors, b.values), strict=True)
    )


def fetched(plan: Delivery, bases: dict, keys: set[str], channel) -> dict:
    """What arrives on a rank, in one message after the other."""
    own = {key: x for key, x in bases.items() if plan.eigen_workers[key] == channel.rank}
    found = {}
    for parts in plan.parts(keys, own, CPU):
        found |= plan.received(deliver(parts, channel, CPU))
    return found


def test_receivers_are_the_workers_elsewhere():
    plan = delivery()
    assert plan.receivers == {
        "dense/A": (2,),
        "dense/G": (0, 2),
        "blocks/A": (1, 3),
        "blocks/G": (1, 3),
        "diagonal/A": (0, 2),
        "diagonal/G": (2,),
    }
    assert plan.travels
    shared = [FactorSpec("q/A", Side.dense(3), ("q", "k", "v"))]
    workers = {"q": (0,), "k": (1,), "v": (3,)}
    assert delivery(factors=shared, eigen_workers={"q/A": 1}, workers=workers).receivers == {
        "q/A": (0, 3)
    }


def test_nothing_travels_where_eigen_workers_are_the_only_workers():
    alone = {
        "eigen_workers": dict.fromkeys(EIGEN_WORKERS, 1),
        "workers": dict.fromkeys(WORKERS, (1,)),
    }
    plan = delivery(**alone)
    assert not plan.travels and not plan.rounded_at_home
    assert plan.messages(set(EIGEN_WORKERS)) == plan.parts(set(EIGEN_WORKERS), {}, CPU) == []
    # copies are rounded nevertheless: another tensor-parallel rank's plan may send them
    assert delivery(**alone, copied=["dense"]).rounded_at_home == {"dense/A", "dense/G"}


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "keys", [set(EIGEN_WORKERS), {"dense/A", "blocks/G"}, {"diagonal/A"}, set()], ids=len
)
@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_workers_hold_what_the_eigen_worker_keeps(keys, wire, nbytes):
    """Bit for bit, or replicas would drift apart; in however many messages, which nothing holds:
    one may be as large as all eigenbases together."""
    plan = delivery(wire, nbytes=nbytes)

    def work(channel):
        return fetched(plan, {key: basis(key) for key in keys}, keys, channel)

    for rank, found in enumerate(FakeNetwork(plan.world).run(work)):
        assert set(found) == {key for key in keys if rank in plan.receivers[key]}
        for key, got in found.items():
            assert key in plan.rounded_at_home and equal(got, basis(key).rounded(wire)), (rank, key)
            assert torch.equal(got.values, basis(key).values), "values travel in 32 bits"
            for tensor in (*got.vectors, got.values):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("nbytes", [1, 300, 1000])
def test_a_message_carries_at_most_so_many_bytes_from_and_to_a_rank(nbytes):
    plan, size = (
        delivery(nbytes=nbytes),
        {key: 4 * EIGEN.wire_numel(SIDES[key[:-2]]) for key in EIGEN_WORKERS},
    )
    messages = plan.messages(set(EIGEN_WORKERS))
    assert sorted(pair for pairs in messages for pair in pairs) == [
        (place, rank) for place, factor in enumerate(FACTORS) for rank in plan.receivers[factor.key]
    ]
    assert (len(messages) == 1) == (nbytes == 1000)
    for pairs in messages:
        loads = {}
        for place, rank in pairs:
            key = FACTORS[place].key
            for end in (("from", EIGEN_WORKERS[key]), ("to", rank)):
                loads.setdefault(end, []).append(size[key])
        assert all(len(sizes) == 1 or sum(sizes) <= nbytes for sizes in loads.values())


@pytest.mark.parametrize("wire", [torch.float32, torch.float16])
def test_inverses_travel_as_triangles_in_32_bits_and_arrive_to_the_bit(wire):
    plan, keys = delivery(wire, method=METHODS["inverse"]), set(EIGEN_WORKERS)
    factors = {factor.key: factor_of(factor.key) for factor in FACTORS}
    whole = {
        k: refresh_inverse(f, None, damping=0.1, damping_kind="relative").basis
        for k, f in factors.items()
    }

    def work(channel):
        return fetched(plan, {key: whole[key] for key in keys - {"dense/G"}}, keys, channel)

    for rank, found in enumerate(FakeNetwork(plan.world).run(work)):
        assert set(found) == {key for key in keys if rank in plan.receivers[key]}
        for key, got in found.items():
            expected = torch.zeros_like(packed(got)) if key == "dense/G" else packed(whole[key])
            assert torch.equal(packed(got), expected), (rank, key)
            parts = got.blocks if got.diagonal is None else (got.diagonal,)
            most = 4 * METHODS["inverse"].numel(factors[key].side)
            assert all(part.untyped_storage().nbytes() <= most for part in parts)
