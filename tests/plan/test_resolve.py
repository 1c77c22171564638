"""Every null is answered once: from other keys here, from predicted costs in the plan."""

import pytest

from ds_kfac.config.keys import parse
from ds_kfac.config.resolve import resolve
from ds_kfac.directions.kfac_gradient import KFACGradientRule
from ds_kfac.schedule.timetable import Value

NONE = {"factor.prediction", "factor.rows", "assignment.memory_budget_gb"}
"""Null is a value of these: the model's own output, so many rows as a factor needs, no limit."""
PLANNED = {"preconditioner.precision", "assignment.gradient_worker_fraction", "communication.dtype"}
"""Answered by the plan."""
BUILT = {"ops.backend"}
"""Answered by what can be built on the ranks."""


def nulls(config) -> set[str]:
    blocks = ((name, getattr(config, name)) for name in type(config).model_fields)
    return {
        f"{name}.{key}"
        for name, block in blocks
        if hasattr(block, "model_fields_set")
        for key in type(block).model_fields
        if getattr(block, key) is None
    }


def test_no_null_is_left_but_for_the_plan():
    config, reasons = resolve(
        parse({}), fisher="empirical", blocks=("damping", "preconditioner", "adam")
    )
    assert nulls(config) == NONE | PLANNED | BUILT
    assert {reason.split()[0] for reason in reasons} == nulls(parse({})) - nulls(config)


@pytest.mark.parametrize(
    ("optimizer", "block", "eigenvalues"),
    [
        ("AdamW", {}, "corrected"),
        ("FusedLamb", {}, "corrected"),
        ("SGD", {}, "kronecker"),
        ("AdamW", {"preconditioner": {"eigenvalues": "kronecker"}}, "kronecker"),
        ("AdamW", {"preconditioner": {"method": "inverse"}}, "kronecker"),
    ],
)
def test_eigenvalues_follow_the_optimizer(optimizer, block, eigenvalues):
    config, _ = KFACGradientRule().resolved(parse(block), optimizer)
    assert config.preconditioner.eigenvalues == eigenvalues


def test_answers_follow_other_keys_and_unread_blocks_have_no_reason():
    config, _ = resolve(parse({"damping": {"kind": "tikhonov"}}), fisher="empirical")
    assert config.damping.value == Value.constant(1e-3)
    _, reasons = resolve(parse({}), fisher="activations_only", blocks=("adam",))
    assert not any(reason.startswith(("damping", "preconditioner")) for reason in reasons)
    assert "factor.fisher activations_only (default for this optimizer)" in reasons
