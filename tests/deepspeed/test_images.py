"""A CNN without any nn.Linear trains like tests/oracle_images.py in ZeRO 0 to 3: strides, groups,
depthwise filters, a transposed convolution, a head that two resolutions share, norms of images in
training and in eval mode."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import spread
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import ReferenceStep, build, reference_options, weights
from tests.models import cross_entropy, make_net
from tests.oracle_images import ImageKFAC
from tests.ranks import run_ranks
from tests.spread import Variation, difference, within

pytestmark = pytest.mark.distributed
STEPS, ROWS, ACCUMULATION, CLASSES = 4, 4, 2, 3
CONVOLUTIONS = ["Conv2d", "ConvTranspose2d"]
NORMS = [*CONVOLUTIONS, "BatchNorm", "GroupNorm"]


class ConvNet(nn.Module):
    """Logits [N, C], as classifiers whose loss is computed outside return them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.down = nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2, padding_mode="circular")
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8, bias=False)
        self.frozen = nn.BatchNorm2d(8)
        self.frozen.running_var.fill_(0.5)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.groups = nn.GroupNorm(2, 6)
        self.point = nn.Conv2d(6, 8, 1)
        self.head = nn.Conv2d(8, CLASSES, (3, 1), padding=(1, 0))
        for norm in (self.norm, self.frozen, self.groups):
            nn.init.normal_(norm.weight)

    def train(self, mode: bool = True) -> "ConvNet":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.tanh(self.norm(self.stem(x)))
        coarse = torch.tanh(self.frozen(self.depthwise(torch.tanh(self.down(fine)))))
        fine = torch.tanh(self.point(torch.tanh(self.groups(self.up(coarse) + fine))))
        return sum(self.head(level).mean((2, 3)) for level in (fine, coarse))


def case(adam=False, orthogonal=False, **blocks):
    """A row of the table: kfac blocks merged into the tests' own."""
    kfac = {key: {**KFAC.get(key, {}), **blocks.get(key, {})} for key in {*KFAC, *blocks}}
    kfac["layers"] = {"types": NORMS, **blocks.get("layers", {})}
    kfac["factor"]["rows"] = "all"
    return {"adam": adam, "orthogonal": orthogonal, "kfac": kfac}


CASES = {
    "kfac": case(),
    "relative-corrected": case(
        damping={"kind": "relative", "value": 0.3},
        preconditioner={"eigenvalues": "corrected", "kl_clip": 0.001},
    ),
    "inverse": case(
        preconditioner={"method": "inverse"}, damping={"kind": "relative", "value": 0.3}
    ),
    "reduce": case(factor={"weight_sharing": "reduce"}),
    "adam": case(adam=True, orthogonal=True),
    "adam-A": case(
        adam=True,
        orthogonal=True,
        factor={"fisher": "activations_only"},
        layers={"types": CONVOLUTIONS},
    ),
}


def batch(step: int, count: int) -> tuple[Tensor, Tensor]:
    """Images [count, 3, 6, 6] and labels."""
    generator = torch.Generator().manual_seed(3000 + step)
    x = torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float32)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def expected_weights(mode, initial: dict, world: int, variation: Variation) -> dict:
    """On micro-batches, whose statistics are BatchNorm's."""
    model = make_net(ConvNet)
    model.load_state_dict(initial, strict=False)
    kfac = ImageKFAC(model, **reference_options(mode.kfac))
    step, parts = ReferenceStep(mode, model, model, kfac), world * ACCUMULATION
    for index in range(STEPS):
        x, y = batch(index, parts * ROWS)
        for images, labels in zip(x.split(ROWS), y.split(ROWS), strict=True):
            images, labels = variation.rows(images, labels)
            (
                cross_entropy(model(images.to(variation.dtype(images.dtype))), labels) / parts
            ).backward()
        step(1.0)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def worker(payload) -> dict:
    world, rank, results = dist.get_world_size(), dist.get_rank(), {}
    expected: dict[str, spread.Expected] = {}
    for name, stage in payload:
        settings = CASES[name]
        mode = replace(
            BY_NAME[stage],
            adam=settings["adam"],
            orthogonal=settings["orthogonal"],
            kfac=copy.deepcopy(settings["kfac"]),
        )
        engine = build(
            mode, ACCUMULATION, model=make_net(ConvNet), train_micro_batch_size_per_gpu=ROWS
        )
        initial = weights(engine)
        for index in range(STEPS):
            x, y = batch(index, world * ACCUMULATION * ROWS)
            for micro in range(ACCUMULATION):
                own = slice(
                    (rank * ACCUMULATION + micro) * ROWS, (rank * ACCUMULATION + micro + 1) * ROWS
                )
                engine.backward(cross_entropy(engine(x[own]), y[own]))
                engine.step()
        final = weights(engine)
        key = name + mode.groups
        if rank == 0 and key not in expected:  # every stage starts with the same weights
            expected[key] = spread.expected(
                partial(expected_weights, mode, initial, world), initial
            )
        results[name, stage] = (
            difference(final, expected[key].weights, initial) if rank == 0 else 0.0,
            expected[key].bound if rank == 0 else 1.0,
            sorted(layer.name for layer in engine.kfac.preconditioner.layers),
            float(engine.kfac.metrics.summary.sum()),
        )
        engine.destroy()
    return results


def test_a_cnn_matches_reference_in_every_stage():
    stages = ["z0", "z2", "z3"]
    cases = [
        (name, stage)
        for i, name in enumerate(CASES)
        for k, stage in enumerate(stages)
        if not i or k != i % 3
    ]
    cases += [("kfac", "z1"), ("kfac", "z2-groups"), ("adam", "adam-z2-groups")]
    wrong = []
    for (name, stage), (error, bound, layers, trouble) in run_ranks(
        "tests.deepspeed.test_images:worker", world=2, payload=cases
    )[0].items():
        wrong += within(f"{name} {stage}", error, bound)
        norms = [] if name == "adam-A" else ["frozen", "groups", "norm"]
        assert layers == sorted(["stem", "down", "depthwise", "up", "point", "head", *norms])
        if trouble:
            wrong.append(f"{name} {stage}: {trouble} layers in trouble")
    assert not wrong, "\n".join(wrong)


def traps_worker(_) -> dict:
    """What users of DeepSpeed meet with images."""
    mode = BY_NAME["z2-bf16"]
    found = {}
    try:
        build(BY_NAME["z0"], 1, model=make_net(ConvNet).to(memory_format=torch.channels_last))
    except ValueError as error:
        found["format"] = str(error)
    model = make_net(ConvNet)
    model.scale = nn.Parameter(torch.tensor(1.0))
    try:
        build(BY_NAME["z0"], 1, model=model)
    except ValueError as error:
        found["scalar"] = str(error)
    for name, more in (("plain", {}), ("buffers", {"data_types": {"buffer_dtype": "bf16"}})):
        engine = build(
            mode, 1, model=make_net(ConvNet), train_micro_batch_size_per_gpu=ROWS, **more
        )
        found[name] = engine.kfac.report
        if name == "buffers":
            x, y = batch(0, ROWS)
            x = x.to(engine.device, torch.bfloat16).to(memory_format=torch.channels_last)
            for _ in range(3):
                engine.backward(cross_entropy(engine(x).float(), y))
                engine.step()
            found["finite"] = all(bool(w.isfinite().all()) for w in weights(engine).values())
            found["trouble"] = float(engine.kfac.metrics.summary.sum())
        engine.destroy()
    for kind in ("relative", "tikhonov"):
        model = make_net(ConvNet)
        nn.init.zeros_(model.norm.weight)
        engine = build(
            BY_NAME["z2"], 1, model=model, kfac={**KFAC, "damping": {"kind": kind, "value": 0.1}}
        )
        found[kind] = engine.kfac.report
        engine.destroy()
    return found


def test_traps_of_images_are_said():
    found = run_ranks("tests.deepspeed.test_images:traps_worker", world=2)[0]
    assert (
        "stem.weight is stored in another order than its shape (channels_last, a" in found["format"]
    )
    assert "scale has no dimension" in found["scalar"] and "p.data.view(1)" in found["scalar"]
    assert "BatchNorm's running statistics stay each rank's own" in found["plain"]
    warning = "WARNING: 1 norms begin with a weight of zero (norm, ..)"
    assert warning in found["relative"] and warning not in found["tikhonov"]
    remedy = '"data_types": {"buffer_dtype": ...}'
    assert remedy in found["plain"] and remedy not in found["buffers"]
    assert found["finite"] and not found["trouble"]
    assert (
        "matrix parameters" in found["plain"]
        and "in 6 K-FAC layers (5 Conv2d, 1 ConvTranspose2d)" in found["plain"]
    )
