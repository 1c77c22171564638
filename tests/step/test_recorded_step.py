"""A rank's own part of a step, recorded once and replayed with other gradients, gives what running
it gives: by a trace of its operations on the CPU, by a CUDA graph on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.directions.direction import StepContext
from ds_kfac.directions.kfac_gradient import KFACGradient, KFACGradientRule
from tests.choices import planned
from tests.close import exact
from tests.directions.outbox import exchange_of, whole
from tests.models import linear_layer

SHAPES = [(33, 65), (33, 65), (65, 33), (33, 65)]
CASES = {
    "kronecker": {"preconditioner": {"kl_clip": 0.001}},
    "batched": {},
    "corrected, batched": {"preconditioner": {"eigenvalues": "corrected"}},
}


def make(case: str, device: torch.device):
    """A function of gradients and learning rate: results, second moments after the step, kl-clip's
    factor. Each call begins with the same moments."""
    plan = planned(CASES[case], batched="batched" in case, device=device)
    plan.layers = layers = [
        linear_layer(f"l{i}", columns, rows) for i, (rows, columns) in enumerate(SHAPES)
    ]
    generator = torch.Generator().manual_seed(0)

    def basis(dim: int) -> Eigenbasis:
        Q = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
        return Eigenbasis((Q[None].to(device),), torch.rand(dim, generator=generator).to(device))

    moments = KFACGradientRule().moments(plan.config)
    direction = KFACGradient(plan, exchange_of(layers, device), moments, SimpleNamespace(nu=None))
    for group in direction.layer_groups:
        for index, layer in enumerate(group.layers):
            group.rebase(index, A=basis(layer.A.dim), G=basis(layer.G.dim))
    kept = [x for group in direction.layer_groups if moments for x in vars(group.moments).values()]

    def step(gradients: list[torch.Tensor], lr: torch.Tensor) -> list[torch.Tensor]:
        for x in kept:
            x.zero_()
        direction.exchange.begin()
        context = StepContext(3, [{"lr": lr}])
        names = [layer.name for layer in layers]
        outcome = direction.step(context, whole(dict(zip(names, gradients, strict=True))))
        flags = torch.ones(len(layers), dtype=torch.bool, device=device)
        scales = direction.finish(context, outcome, outcome.numbers, flags)
        return [
            *direction.exchange.results.values(),
            *(x.clone() for x in kept),
            *list(scales.values())[:1],
            outcome.replaced,
        ]

    return step


def inputs(seed: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(*shape, generator=generator).to(device) for shape in SHAPES]
    if seed == 2:
        gradients[1][3, 4] = float("inf")
    return gradients, torch.tensor(0.1 * seed, device=device)


def check(replay, step, device) -> None:
    for seed in (1, 2, 3):
        expected, actual = step(*inputs(seed, device)), replay(*inputs(seed, device))
        assert int(expected[-1]) == (seed == 2)
        for one, other in zip(actual, expected, strict=True):
            exact(one, other)


@pytest.mark.parametrize("case", CASES)
def test_a_trace_replays_what_a_step_does(case):
    device = torch.device("cpu")
    step = make(case, device)
    step(*inputs(7, device))  # copies of eigenvectors are made at the first step
    check(make_fx(step)(*inputs(4, device)), step, device)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: nothing is captured in a CUDA graph"
)
@pytest.mark.parametrize("case", CASES)
def test_a_cuda_graph_replays_what_a_step_does(case):
    device = torch.device("cuda")
    step = make(case, device)
    gradients, lr = inputs(4, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(gradients, lr)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(gradients, lr)

    def replay(new, new_lr):
        for old, values in zip((*gradients, lr), (*new, new_lr), strict=True):
            old.copy_(values)
        graph.replay()
        return [part.clone() for part in recorded]

    check(replay, step, device)
