"""A new update rule, and a new method of factors, is one file and one line of a table: no other file knows them."""

import contextlib
import io

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_kfac
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.model.batch import BatchInfo
from tests.close import close
from tests.deepspeed.modes import KFAC, MICRO_ROWS, OFFLOAD, Mode
from tests.deepspeed.runs import train, weights
from tests.deepspeed.toys import ROOT, SoftSign, ToyRule, ToySGD
from tests.models import make_batch, make_net
from tests.oracle import ReferenceKFAC
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
LR, STEPS = 0.02, 4


class ToyReference(ReferenceKFAC):
    """The same on one device."""

    toy: str

    def step(self, lr: float, grad_scale: float = 1.0, seed: float = 1.0) -> None:
        late = self.toy != "method" and self.steps > 0  # moments go with a basis, which is used from the next step on
        self.fold(seed)
        if not late:
            self.refresh(self.steps)
        for layer in self.layers.values():
            dW, ((alpha, QA), (beta, QG)) = layer.matrix(), layer.bases
            if self.toy != "method":
                layer.m = (layer.m + QG.T @ dW @ QA) / 2
                layer.write(QG @ (layer.m / (layer.m.abs() + 0.1)) @ QA.T)
            else:
                G, A = (Q @ ((e + 0.1) ** -0.5).diag() @ Q.T for Q, e in ((QG, beta), (QA, alpha)))
                layer.write(G @ dW @ A)
        if late:
            self.refresh(self.steps)
        self.steps += 1


def expected(toy: str, world: int, clip: float) -> dict[str, torch.Tensor]:
    model = make_net()
    reference = ToyReference(model, refresh_interval=2, decay=0.9, kl_clip=None)
    reference.toy = toy
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*make_batch(step, world * MICRO_ROWS)).backward()
        if clip and toy == "front":
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        reference.step(LR)
        if clip and toy != "front":
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


CLIP = 0.5
CASES = {
    "stage 0": (0, {}, 0.0),
    "stage 2": (2, {}, 0.0),
    "stage 0, clipped": (0, {}, CLIP),
    "stage 2, clipped": (2, {}, CLIP),
    "stage 2, clipped, offload": (2, OFFLOAD, CLIP),
    "stage 3, clipped, offload": (3, OFFLOAD, CLIP),
}
"""DeepSpeed clips what the toy rule makes, which does not say that it clips itself; a rule without an optimizer of its
own clips gradients before."""


class InFront(ToyRule):
    optimizer_type = None

    def direction(self, *arguments) -> SoftSign:
        direction = super().direction(*arguments)
        direction.clips = True
        return direction


def worker(names: list[str]) -> dict:
    DIRECTIONS.insert(0, ToyRule())
    METHODS["inverse"] = ROOT  # the config knows no other name
    found = {}
    for toy in ("rule", "method", "front"):
        DIRECTIONS[0] = InFront() if toy == "front" else ToyRule()
        for name in names:
            stage, zero, clip = CASES[name]
            if (toy == "method" and clip) or (toy == "front" and (not clip or zero)):
                continue
            wanted = expected(toy, dist.get_world_size(), clip)
            kfac = {**KFAC, "preconditioner": {"kl_clip": 0, "method": "inverse" if toy == "method" else "eigen"}}
            model = make_net()
            optimizer = (torch.optim.SGD if toy == "method" else ToySGD)(model.parameters(), lr=LR)
            config = {**Mode("toy", stage, zero=zero, clip=clip).config(1, dist.get_world_size()), "kfac": kfac}
            del config["optimizer"]
            with contextlib.redirect_stdout(io.StringIO()):
                engine, *_ = ds_kfac.initialize(model=model, optimizer=optimizer, config=config)
            train(engine, 1, STEPS)
            off = {name: float((w - wanted[name]).abs().max()) for name, w in weights(engine).items()}
            found[toy, name] = max(off.values()), engine.kfac.report
            engine.destroy()
    return found


def test_a_toy_rule_and_a_toy_form_train():
    for of_rank in run_ranks("tests.deepspeed.test_toys:worker", world=2, payload=list(CASES)):
        for (toy, name), (off, report) in of_rank.items():
            close(off, 0.0, sums=STEPS * 60, scale=1.0, dtype=torch.float32, what=f"{toy} {name}")
            assert ("roots every" if toy == "method" else "soft sign") in report


class Miscounting(ToyRule):
    numbers = 2


def without_worker(_) -> dict:
    """Two steps of which no row counts, and the same with plain SGD; and a rule that does not give its numbers."""
    DIRECTIONS[:0] = [rule := ToyRule()]
    found = {}
    for name, optimizer in (("toy", ToySGD), ("plain", None)):
        model = make_net()
        config = Mode("toy", 2, clip=0.0).config(1, dist.get_world_size())
        del config["optimizer"]
        with contextlib.redirect_stdout(io.StringIO()):
            if optimizer is None:
                engine, *_ = deepspeed.initialize(
                    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR),
                    config={key: value for key, value in config.items() if key != "kfac"})  # fmt: skip
            else:
                engine, *_ = ds_kfac.initialize(
                    model=model, optimizer=optimizer(model.parameters(), lr=LR), config={**config, "kfac": KFAC}
                )
                engine.kfac.read_batch = lambda *_: BatchInfo(rows=torch.zeros(MICRO_ROWS, 3, dtype=torch.bool))
        train(engine, 1, 2)
        found[name] = weights(engine)
        if optimizer is not None:
            found["counted"], found["said"] = engine.kfac.counters()["unpreconditioned_layers"], engine.kfac.report
            engine.kfac.preconditioner.rule = Miscounting()
            try:
                train(engine, 1, 1)
            except ValueError as error:
                found["error"] = str(error)
        engine.destroy()
    DIRECTIONS.remove(rule)
    return found


def test_a_rule_of_one_layer_need_not_know_layers_without_a_basis():
    for found in run_ranks("tests.deepspeed.test_toys:without_worker", world=2):
        assert found["counted"] == 3
        for name, weight in found["plain"].items():
            close(found["toy"][name], weight, sums=2 * 60, dtype=torch.float32, what=name)
        assert "ToySGD, along their own gradients" in found["said"], "of norms"
        assert found["error"] == (
            "ds_kfac: Miscounting.numbers is 2, but its Direction.local gave 0 scalars in LocalResult.numbers; make "
            "them the same number"
        )


def test_a_rule_says_which_method_it_lacks():
    with pytest.raises(TypeError, match="direction"):
        type("Half", (UpdateRule,), {"claims": ToyRule.claims, "described": ToyRule.described})()
