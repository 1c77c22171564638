"""A new update rule, and a new method of factors, is one file and one line of a table: no other
file knows them."""

import contextlib
import io
from dataclasses import replace

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_kfac
from ds_kfac.config.keys import parse
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.step import proving
from tests.choices import chosen
from tests.close import close
from tests.deepspeed.modes import CLIPPED, KFAC, LR, OFFLOAD, SCALE, STEPS, Mode
from tests.deepspeed.runs import expected, patched, train, weights
from tests.deepspeed.toy_method import ROOT
from tests.deepspeed.toys import ToyRule, ToySGD
from tests.models import make_net
from tests.oracle import ReferenceKFAC, _seen
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed


class ReferenceRule(ReferenceKFAC):
    """The toy rule on one device. Its moments go into new bases before the gradient does."""

    def step(self, lr: float) -> None:
        self.update()
        for layer in self.layers.values():
            dW, ((alpha, QA), (beta, QG)) = layer.matrix(), layer.bases
            layer.m = (layer.m + QG.T @ dW @ QA) / 2
            seen = torch.outer(*map(_seen, (beta, alpha), reversed(layer.blocks)))
            V = QG @ (layer.m / (layer.m.abs() + 0.01) * seen) @ QA.T
            layer.write(V * (dW.norm() / V.norm()))


class ReferenceMethod(ReferenceKFAC):
    """The toy method on one device."""

    def step(self, lr: float) -> None:
        self.update()
        for layer in self.layers.values():
            (alpha, QA), (beta, QG) = layer.bases
            G, A = (Q @ ((e + 0.1) ** -0.5).diag() @ Q.T for Q, e in ((QG, beta), (QA, alpha)))
            layer.write(G @ layer.matrix() @ A)


class ToyMode(Mode):
    """Stepped by SGD, whatever the precision."""

    @property
    def optimizer(self) -> dict:
        return {"type": "SGD", "params": {"lr": LR}}


PLAIN_KFAC = {"preconditioner": {"kl_clip": 0}}
BATCHED = {**PLAIN_KFAC, "plan": {"batched": True}}
"""Layers of one shape in one batch, as on GPUs: a block that tests alone have
(tests/choices.py)."""
MODES = [
    *(ToyMode(f"stage {stage}", stage, clip=0.0, kfac=PLAIN_KFAC) for stage in range(4)),
    ToyMode("stage 2, batched", 2, clip=0.0, kfac=BATCHED),
    *(
        ToyMode(f"stage {stage}, clipped", stage, clip=CLIPPED, kfac=PLAIN_KFAC)
        for stage in range(4)
    ),
    *(
        ToyMode(f"stage {stage}, offload", stage, zero=OFFLOAD, clip=CLIPPED, kfac=PLAIN_KFAC)
        for stage in (2, 3)
    ),
    *(
        ToyMode(f"stage {stage}, fp16", stage, "fp16", extra=SCALE, clip=0.0, kfac=PLAIN_KFAC)
        for stage in (1, 2, 3)
    ),
    ToyMode("stage 2, bf16", 2, "bf16", clip=0.0, kfac=PLAIN_KFAC),
    *(
        ToyMode(
            f"stage {stage}, fp16, clipped",
            stage,
            "fp16",
            extra=SCALE,
            clip=CLIPPED,
            kfac=PLAIN_KFAC,
        )
        for stage in (1, 2, 3)
    ),
]


class InFront(ToyRule):
    optimizer_type = None


TOYS = {
    "rule": (ToyRule, ReferenceRule),
    "front": (InFront, ReferenceRule),
    "method": (ToyRule, ReferenceMethod),
}


def worker(modes: list[Mode]) -> dict:
    DIRECTIONS.insert(0, ToyRule())
    METHODS["inverse"] = ROOT  # the config knows no other name
    found = {}
    for toy, (rule, kind) in TOYS.items():
        DIRECTIONS[0] = rule()
        for mode in modes:
            if (toy == "method" and mode.clip) or (toy == "front" and (not mode.clip or mode.zero)):
                continue
            if toy == "method":
                mode = replace(
                    mode, kfac={**mode.kfac, "preconditioner": {"kl_clip": 0, "method": "inverse"}}
                )
            with (
                patched(mode),
                contextlib.redirect_stdout(io.StringIO()),
                chosen(mode.kfac_block) as block,
            ):
                model = make_net()
                optimizer = (torch.optim.SGD if toy == "method" else ToySGD)(
                    model.parameters(), lr=LR
                )
                config = {**mode.config(1, dist.get_world_size()), "kfac": block}
                del config["optimizer"]
                engine, *_ = ds_kfac.initialize(model=model, optimizer=optimizer, config=config)
            initial, report = weights(engine), engine.kfac.report
            with patched(mode):
                train(engine, 1)
            final, off, bound = weights(engine), 0.0, 1.0
            if dist.get_rank() == 0:  # every rank has the same weights in the end
                wanted = expected(mode, 1, dist.get_world_size(), initial, kind=kind)
                off, bound = difference(final, wanted.weights, initial), wanted.bound
            found[toy, mode.name] = off, bound, engine.kfac.counters(), report
            engine.destroy()
    return found


def test_a_toy_rule_and_a_toy_method_train():
    complaints = []
    for of_rank in run_ranks("tests.deepspeed.test_toys:worker", world=2, payload=MODES):
        for (toy, name), (off, bound, counters, report) in of_rank.items():
            complaints += within(f"{toy}, {name}", off, bound)
            assert counters["steps"] == STEPS and not counters["not_finite_layers"], (
                f"{toy}, {name}"
            )
            step = (
                "roots every"
                if toy == "method"
                else "step: the update rule's direction, applied by ToySGD"
            )
            assert step in report, "a rule need not say anything about itself"
    assert not complaints, "\n".join(complaints)


def named_worker(_) -> dict:
    """Two steps by a config that names the toy's optimizer, and by its object."""
    DIRECTIONS.insert(0, rule := ToyRule())
    found = {}
    for way in ("config", "object"):
        config, model = Mode("toy", 2, clip=0.0).config(1, dist.get_world_size()), make_net()
        arguments = {"model_parameters": model.parameters()}
        config["optimizer"] = {"type": "ToySGD", "params": {"lr": LR}}
        if way == "object":
            del config["optimizer"]
            arguments = {"optimizer": ToySGD(model.parameters(), lr=LR)}
        engine, *_ = ds_kfac.initialize(model=model, config=config, **arguments)
        train(engine, 1, 2)
        found[way] = repr(engine.kfac), engine.kfac.report, weights(engine)
        engine.destroy()
    DIRECTIONS.remove(rule)
    return found


def test_a_config_names_the_toys_optimizer():
    for found in run_ranks("tests.deepspeed.test_toys:named_worker", world=2):
        (shown, report, named), (_, _, of_object) = found["config"], found["object"]
        assert shown.startswith("<ds_kfac.Attachment: ToySGD, ZeRO stage 2") and "2 steps" in shown
        assert "step: the update rule's direction, applied by ToySGD" in report
        assert all(torch.equal(weight, of_object[name]) for name, weight in named.items())


class Miscounting(ToyRule):
    numbers = 2


def without_worker(_) -> dict:
    """Two steps in which a hook of every layer failed, and the same with plain SGD; and a rule that
    does not give its numbers."""
    proving.RAISES = False
    DIRECTIONS[:0] = [rule := ToyRule()]
    found = {}
    for name, optimizer in (("toy", ToySGD), ("plain", None)):
        model = make_net()
        config = Mode("toy", 2, clip=0.0).config(1, dist.get_world_size())
        del config["optimizer"]
        with contextlib.redirect_stdout(io.StringIO()):
            if optimizer is None:
                engine, *_ = deepspeed.initialize(
                    model=model,
                    optimizer=torch.optim.SGD(model.parameters(), lr=LR),
                    config={key: value for key, value in config.items() if key != "kfac"},
                )
            else:
                engine, *_ = ds_kfac.initialize(
                    model=model,
                    optimizer=optimizer(model.parameters(), lr=LR),
                    config={**config, "kfac": KFAC},
                )
                kfac = engine.kfac.preconditioner
                for layer in kfac.layers:
                    kfac.capture.fail(layer, TypeError("no matrix"))
        train(engine, 1, 2)
        found[name] = weights(engine)
        if optimizer is not None:
            found["counted"], found["said"] = (
                engine.kfac.counters()["unpreconditioned_layers"],
                engine.kfac.report,
            )
            engine.kfac.preconditioner.totals.rule = Miscounting()
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
            "ds_kfac: Miscounting.numbers is 2, but its Direction.step gave 0 scalars in "
            "Outcome.numbers; make "
            "them the same number"
        )


def test_a_rule_that_needs_a_basis_refuses_a_method_that_keeps_none():
    for rule, name in ((ToyRule(), "ToySGD"), (InFront(), "InFront")):
        with pytest.raises(
            ValueError, match=f'"inverse" keeps no eigenbasis, in which {name} steps; use "eigen"'
        ):
            rule.resolved(parse({"preconditioner": {"method": "inverse"}}))


def test_a_rule_says_which_method_it_lacks():
    with pytest.raises(TypeError, match="direction"):
        type("Half", (UpdateRule,), {"claims": ToyRule.claims})()
