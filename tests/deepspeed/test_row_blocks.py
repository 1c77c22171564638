"""Large layers cut into blocks of rows over ranks: every mode trains like ds_kfac/reference.py with blocks in G."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.reference import ReferenceKFAC
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, expected, train, weights
from tests.models import CLASSES, FEATURES, cross_entropy, make_net
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
MAX_OUTPUTS = 20  # over every input side, so that the reference, which bounds both, cuts the same


class WideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(FEATURES, 50), nn.Linear(FEATURES, 50)
        self.v = nn.Linear(FEATURES, 33, bias=False)
        self.head = nn.Linear(83, CLASSES)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z = self.head(torch.cat([torch.tanh(self.q(x)) * self.k(x), torch.sigmoid(self.v(x))], dim=-1))
        return z if y is None else cross_entropy(z, y)


CASES = {
    "z0": (None, {}),
    "z0, two workers": ("z0", {"assignment": {"gradient_worker_fraction": 0.5}}),
    "z1": (None, {}),
    "z2": (None, {}),
    "z3": (None, {}),
    "z3, split factors": ("z3", {"assignment": {"split_factors": True, "load_tolerance": 0.0}}),
    "z2, adam": ("adam-z2", {"adam": {"orthogonalize": False, "nesterov": False}}),
}


def block(**blocks) -> dict:
    return {
        **KFAC,
        "factor": {**KFAC["factor"], "max_dim": None},
        "damping": {"value": 0.01, "kind": "tikhonov"},
        "layers": {**KFAC.get("layers", {}), "exclude": ["^head$"], "max_outputs": MAX_OUTPUTS},
        "eigenbasis": {**KFAC["eigenbasis"], "stagger": False},
        **blocks,
    }


def worker(folder) -> dict:
    results, world = {}, dist.get_world_size()
    for name, (base, blocks) in CASES.items():
        mode = replace(BY_NAME[base or name], orthogonal=False)
        kfac = block(**blocks)
        engine = build(mode, 2, model=make_net(WideNet), kfac=kfac)
        initial, found = weights(engine), None
        if dist.get_rank() == 0:
            theirs = {**kfac, "factor": {**kfac["factor"], "max_dim": MAX_OUTPUTS, "large_output": "blocks"}}
            theirs["layers"] = {}
            kind = partial(ReferenceKFAC, exclude=("head",))
            found = expected(mode, 2, world, initial, kfac_config=theirs, model=WideNet, kind=kind)
        train(engine, 2)
        after, state = weights(engine), engine.kfac.optimizer
        every = [None] * world
        dist.all_gather_object(every, [layer.name for layer in state.owned])
        engine.save_checkpoint(folder, tag=name.replace(" ", "_"))
        train(engine, 2, steps=2, first=100)
        continued = weights(engine)
        engine.destroy()
        engine = build(mode, 2, model=make_net(WideNet), kfac=kfac)
        engine.load_checkpoint(folder, tag=name.replace(" ", "_"))
        train(engine, 2, steps=2, first=100)
        resumed = weights(engine)
        results[name] = {
            "difference": difference(after, found.weights, initial) if found else 0.0,
            "bound": found.bound if found else 1.0,
            "owned": every,
            "groups": state.groups,
            "resumed": max(float((continued[key] - resumed[key]).abs().max()) for key in resumed),
        }
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_row_blocks_train_like_blocks_of_G(world, tmp_path):
    results = run_ranks("tests.deepspeed.test_row_blocks:worker", world=world, payload=str(tmp_path))
    for name, result in results[0].items():
        assert not within(name, result["difference"], result["bound"]), (name, result["difference"], result["bound"])
        assert result["groups"] == (("q.rows_0_17", "k.rows_0_17"),), name
        assert result["resumed"] == 0.0, name
        assert len(set().union(*map(set, result["owned"]))) == 8
        spread = {
            q: sum(any(layer.startswith(q) for layer in own) for own in result["owned"]) for q in ("q.", "k.", "v.")
        }
        assert max(spread.values()) > 1, f"{name}: several ranks share the work of one layer: {spread}"
