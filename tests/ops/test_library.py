"""Registered ops: schema, fake kernel and functionalization are right, and torch.compile keeps them in one graph."""

import pytest
import torch

from ds_kfac.ops import check, dispatch
from tests.close import close, exact

CPU = torch.device("cpu")
BLOCKED = ((torch.ones(3 * 28), torch.randn(5, 21)), {"block": 7, "scale": 2.0})


def calls(op: str) -> list[tuple]:
    """(arguments, options) as callers give them."""
    if op in check.PROBED:
        return check.probes(op, torch.float32)
    return [{"block_syrk_accumulate_": BLOCKED}[op]]


def schema_arguments(op: str, monkeypatch) -> list[tuple]:
    """What the registered op is called with."""
    given: list[tuple] = []

    class Noting:
        def __getattr__(self, name):
            return lambda *arguments: given.append(arguments)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_ops", Noting())
        for arguments, options in calls(op):
            dispatch.TRACED[op](*arguments, **options)
    return given


def test_every_op_is_registered():
    assert set(dispatch.SCHEMAS) == set(dispatch.TRACED) == set(dispatch.OPS)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_opcheck_finds_nothing(op, monkeypatch):
    for arguments in schema_arguments(op, monkeypatch):
        torch.library.opcheck(getattr(torch.ops.ds_kfac, op).default, arguments)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_a_compiled_call_is_one_graph_with_the_op_in_it_and_gives_the_same(op):
    function, graphs = getattr(dispatch, op), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for arguments, options in calls(op):
        ours, theirs = (check.moved(arguments, CPU) for _ in range(2))
        compiled = torch.compile(lambda *given, o=options: function(*given, **o), backend=backend, fullgraph=True)
        found, wanted = compiled(*ours), function(*theirs, **options)
        exact((found, ours), (wanted, theirs))
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert f"ds_kfac.{op}" in names, names


def test_a_step_compiles_through_functionalization():
    """aot_eager: fake kernels, and mutations made functional."""
    x = torch.randn(9, 7)

    def step(total, x):
        dispatch.syrk_accumulate_(total, x, scale=0.5)
        (matrix,) = dispatch.symmetric_unpack_from(total, [0], [7])
        one = total.new_ones(1)
        dispatch.finish_direction_(matrix[None], one, None, 3 * one, one, 2 * one, one, 0.5)
        return matrix

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ours, theirs = torch.ones(28), torch.ones(28)
    close(compiled(ours, x), step(theirs, x), sums=9)
    assert torch.equal(ours, theirs) and not torch.equal(ours, torch.ones(28))
