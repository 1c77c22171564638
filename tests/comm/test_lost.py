"""What a rank says about a collective that failed on it. Ranks fail one after the other here."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ds_kfac.comm import lost
from ds_kfac.comm.message import Scalars, deliver
from tests.comm.fake_network import FakeNetwork

WORLD = 3
CPU = torch.device("cpu")


class BrokenHandle:
    def wait(self) -> None:
        raise RuntimeError("connection closed")


def launch_fails(**_) -> None:
    raise RuntimeError("connection closed")


def wait_fails(**_) -> BrokenHandle:
    return BrokenHandle()


def error_of(rank: int, store: dist.Store, all_to_all_single: Callable) -> str:
    """The text that ``rank`` raises where its collective fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost, "_store", lambda: store)
        patch.setattr(lost, "WAIT_SECONDS", 0.0)
        patch.setattr(dist, "get_rank", lambda: rank)
        patch.setattr(dist, "get_process_group_ranks", lambda group: [*range(WORLD)])
        patch.setattr(dist, "all_to_all_single", all_to_all_single)
        names = [[each] for each in range(WORLD)]
        part = Scalars(names, rank).part({rank: 1.0}, CPU)
        with pytest.raises(lost.LostRank) as caught:
            deliver([part], FakeNetwork(WORLD).channel(rank), CPU)
    return str(caught.value)


def test_a_rank_whose_launch_fails_and_one_whose_wait_fails_do_not_miss_each_other():
    store = dist.HashStore()
    assert "rank 1, 2 did not come" in error_of(0, store, launch_fails)
    assert "rank 2 did not come" in error_of(1, store, wait_fails)
    assert "no rank has said why" in error_of(2, store, launch_fails)
