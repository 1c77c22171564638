"""engine.compile(): training with K-FAC is that of the engine that is not compiled, and the
compiled graphs are those of an engine without K-FAC: no break and no recompilation of ours,
whatever is due."""

import pytest
import torch

from ds_kfac.model.capture import Capture
from ds_kfac.model.scan import LayerChoice, scan
from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, expected, train, weights
from tests.models import make_net
from tests.ranks import on_rank_0
from tests.spread import difference, within

STEPS, CAPTURED = 7, (0, 3, 6)
INTERVALS = {"factor": {"update_interval": 3}, "eigenbasis": {"refresh_interval": 6}}
BLOCK = merged(KFAC, INTERVALS, {"burn_in": {"steps": 0}})


def counts() -> dict[str, int]:
    """Of graphs compiled, graph breaks and recompilations."""
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "recompiled": sum(counters["recompiles"].values()) + counters["recompile_limit"]["total"],
    }


def trained(name: str, block: dict, backend: str | None) -> tuple[dict, dict, list[dict[str, int]]]:
    """Initial and final weights with the factors, and the counts after each step and after two
    evaluations, the last of them captured."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, enabled = make_net(), block.get("enabled", True)
    if name == "z3":  # its own hooks break the graph: torch then fails on an in-place activation
        model.silu = torch.nn.SiLU()
    engine = build(BY_NAME[name], model=model, kfac=block)
    initial = weights(engine)
    if backend:
        engine.compile(backend=backend)
    history = []
    for step in range(STEPS):
        assert not enabled or engine.kfac.job.active == (step in CAPTURED)
        train(engine, 1, steps=1, first=step)
        history.append(counts())
    final = weights(engine)
    if enabled:
        kfac = engine.kfac.preconditioner
        final |= {key: state.packed_P for key, state in kfac.curvature.factors.items()}
        engine.eval()
        for _ in range(2):
            kfac.capture.active = not kfac.capture.active
            with torch.no_grad():
                x = torch.randn(4, 3, 13, dtype=engine.get_data_types()[0])
                engine(x, torch.zeros(4, 3, dtype=torch.long))
            history.append(counts())
    return initial, final, history


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "backend", "world"),
    [
        ("z0", "aot_eager", 1),
        ("z2-bf16", "aot_eager", 1),
        ("adam-z2", "aot_eager", 1),
        ("z3", "aot_eager", 2),
        ("z2", "inductor", 1),
    ],
)
def test_compiled_training_is_the_same_in_the_graphs_of_the_plain_engine(name, backend, world):
    initial, final, plain = trained(name.removeprefix("adam-"), {"enabled": False}, backend)
    if backend == "inductor" and all(value.equal(initial[key]) for key, value in final.items()):
        return  # torch's inductor makes NaN of this model without K-FAC: with instructions of AVX2
    initial, eager, _ = trained(name, BLOCK, None)
    _, actual, history = trained(name, BLOCK, backend)
    options = {"steps": STEPS, "kfac_config": BLOCK}
    found = on_rank_0(lambda: expected(BY_NAME[name], 1, world, initial, **options))
    start = {key: torch.zeros_like(value) for key, value in eager.items()} | initial
    assert not within(name, difference(actual, eager, start), found.bound)
    assert history[0]["graphs"] == 0, "a captured step is not compiled"
    for key in ("graphs", "breaks", "recompiled"):
        assert history[STEPS - 1][key] == history[2][key], (key, history)
        # at stage 3 DeepSpeed breaks the graph itself, and more often in its first step, not
        # compiled here
        if name != "z3":
            assert history[2][key] == plain[2][key], (key, history, plain)
        elif key != "graphs":
            assert history[2][key] <= plain[2][key], (key, history, plain)
    assert name == "z3" or (plain[2]["graphs"], plain[2]["breaks"]) == (1, 0)
    assert history[STEPS]["graphs"] == history[STEPS + 1]["graphs"], "evaluation is compiled once"


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("sampled", [False, True])
def test_a_trace_and_an_export_in_a_captured_step_have_the_operations_of_the_model_alone(sampled):
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 8, 0.0)
    model, x = torch.nn.Sequential(encoder, torch.nn.Linear(8, 3)), torch.ones(2, 4, 8)

    def operations() -> list[int]:
        exported = [
            torch.export.export(model, (x,), strict=strict).graph for strict in (False, True)
        ]
        traced = torch.jit.trace(model, x).inlined_graph
        return [len(list(traced.nodes())), *(len(graph.nodes) for graph in exported)]

    alone, layers = operations(), scan(model, LayerChoice(types=("Linear",))).layers
    capture = Capture(model, layers, lambda announced: 1.0, sampled=sampled)
    capture.begin_step([key for layer in layers for key in layer.keys], step=0)
    assert capture.active and len(layers) == 5
    assert operations() == alone
