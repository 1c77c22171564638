"""engine.compile(): training with K-FAC is that of the engine that is not compiled, and the
compiled graphs are those of an engine without K-FAC: no break and no recompilation of ours,
whatever is due."""

import pytest
import torch
import torch.distributed as dist

from ds_kfac.model.capture import Capture
from ds_kfac.model.scan import LayerChoice, scan
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, expected, train, weights
from tests.models import make_net
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
STEPS, CAPTURED = 7, (0, 3, 6)
BLOCK = {
    **KFAC,
    "factor": {**KFAC["factor"], "update_interval": 3},
    "eigenbasis": {"refresh_interval": 6},
    "burn_in": {"steps": 0},
}


def counts() -> dict[str, int]:
    """Of graphs compiled, frames looked at, graph breaks and recompilations."""
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "frames": counters["frames"]["total"],
        "breaks": sum(counters["graph_break"].values()),
        "recompiled": sum(counters["recompiles"].values()) + counters["recompile_limit"]["total"],
    }


def trained(
    name: str, block: dict, compile_options: dict | None
) -> tuple[dict, dict, list[dict[str, int]]]:
    """Initial and final weights with the factors, and the counts after each step."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = make_net()
    # its own hooks break the graph, and torch then fails on an in-place activation, also without
    # K-FAC
    if name == "z3":
        model.silu = torch.nn.SiLU()
    engine = build(BY_NAME[name], 1, model=model, kfac=block)
    initial = weights(engine)
    if compile_options is not None:
        engine.compile(**compile_options)
    history = []
    for step in range(STEPS):
        if block.get("enabled", True):
            assert engine.kfac.job.active == (step in CAPTURED)
        train(engine, 1, steps=1, first=step)
        history.append(counts())
    final = weights(engine)
    if block.get("enabled", True):
        kfac = engine.kfac.preconditioner
        final |= {key: state.packed_P for key, state in kfac.curvature.factors.items()}
        engine.eval()
        for _ in range(2):  # evaluation is compiled once, captured or not
            kfac.capture.active = not kfac.capture.active
            with torch.no_grad():
                engine(
                    torch.randn(4, 3, 13, dtype=engine.get_data_types()[0]),
                    torch.zeros(4, 3, dtype=torch.long),
                )
            history.append(counts())
    engine.destroy()
    return initial, final, history


def worker(cases) -> dict:
    results = {}
    for name, options in cases:
        initial, final, plain = trained(name.removeprefix("adam-"), {"enabled": False}, options)
        if all(value.equal(initial[key]) for key, value in final.items()):  # every step was skipped
            results[name, options["backend"]] = None
            continue
        initial, eager, _ = trained(name, BLOCK, None)
        _, actual, history = trained(name, BLOCK, options)
        bound = 1.0
        if dist.get_rank() == 0:
            bound = expected(
                BY_NAME[name], 1, dist.get_world_size(), initial, steps=STEPS, kfac_config=BLOCK
            ).bound
        initial |= {
            key: torch.zeros_like(value) for key, value in eager.items() if key not in initial
        }
        results[name, options["backend"]] = (
            difference(actual, eager, initial),
            bound,
            history,
            plain,
        )
    return results


@pytest.mark.parametrize(("world", "names"), [(1, ("z0", "z2-bf16", "adam-z2")), (2, ("z3",))])
def test_compiled_training_is_the_same_in_the_graphs_of_the_plain_engine(world, names):
    cases = [(name, {"backend": "aot_eager"}) for name in names]
    for result in run_ranks("tests.deepspeed.test_compile:worker", world=world, payload=cases):
        for (name, backend), (error, bound, history, plain) in result.items():
            assert not within(name, error, bound), (name, backend, error, bound)
            assert history[0]["graphs"] == 0, "a captured step is not compiled"
            for key in ("graphs", "breaks", "recompiled"):
                # at stage 3 DeepSpeed breaks the graph itself, and more often in its first step,
                # not compiled here
                same = (
                    history[2][key] <= plain[2][key]
                    if name == "z3"
                    else history[2][key] == plain[2][key]
                )
                assert same or (name, key) == ("z3", "graphs"), (name, key, history, plain)
                assert history[STEPS - 1][key] == history[2][key], (name, key, history)
            assert name == "z3" or (plain[2]["graphs"], plain[2]["breaks"]) == (1, 0), (
                name,
                plain[2],
            )
            assert history[STEPS]["graphs"] == history[STEPS + 1]["graphs"], (
                name,
                "evaluation",
                history,
            )


def test_inductor_trains_the_same():
    (result,) = run_ranks(
        "tests.deepspeed.test_compile:worker", world=1, payload=[("z2", {"backend": "inductor"})]
    )
    if result["z2", "inductor"] is None:  # seen with ATEN_CPU_CAPABILITY=avx2
        pytest.skip("torch's inductor makes NaN of this model without K-FAC")
    error, bound, history, _ = result["z2", "inductor"]
    assert not within("inductor", error, bound), (error, bound)
    assert history[STEPS - 1]["graphs"] == 1 and history[STEPS - 1]["breaks"] == 0


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("sampled", [False, True])
def test_a_trace_and_an_export_in_a_captured_step_have_the_operations_of_the_model_alone(sampled):
    def operations() -> list[int]:
        traced = torch.jit.trace(model, x).inlined_graph
        exported = [
            torch.export.export(model, (x,), strict=strict).graph for strict in (False, True)
        ]
        return [
            len(list(graph.nodes())) if graph is traced else len(graph.nodes)
            for graph in (traced, *exported)
        ]

    model, x = (
        torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 8, 0.0), torch.nn.Linear(8, 3)),
        torch.ones(2, 4, 8),
    )
    alone, layers = operations(), scan(model, LayerChoice(types=("Linear",))).layers
    capture = Capture(model, layers, lambda announced: 1.0, sampled=sampled)
    capture.begin_step([key for layer in layers for key in layer.keys], step=0)
    assert capture.active and len(layers) == 5
    assert operations() == alone
