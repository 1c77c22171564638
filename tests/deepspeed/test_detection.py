"""A small RetinaNet with a head on regions: heads over all levels of a feature pyramid, images without any box, ranks
without any region. Everything stays finite, and the factors are the moments of the rows that there were."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, l1_loss, max_pool2d, relu

from ds_kfac.ops.reference import symmetric_unpack
from tests.close import close
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, weights
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
WIDTH, CLASSES, ROWS, STEPS, DECAY = 8, 3, 2, 8, 0.9
BOXES = [(2, 1), (1, 3), (0, 2), (0, 0), (0, 0), (1, 1), (0, 1), (2, 2)]
"""Boxes in every image of a rank, step by step."""


class Detector(nn.Module):
    """A backbone with frozen norms, a pyramid of three levels, heads that all levels share, a head on boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.deep = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.lateral = nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(2 * WIDTH, WIDTH, 1)])
        self.smooth = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.tower = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.classes, self.sides = nn.Conv2d(WIDTH, CLASSES, 3, padding=1), nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.region, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm.requires_grad_(False)

    def train(self, mode: bool = True) -> "Detector":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        """boxes [n, 3]: image, row, column in the finest level; labels [n]."""
        fine = relu(self.norm(self.stem(images)))
        coarse = relu(self.deep(fine))
        top = self.lateral[1](coarse)
        finest = self.smooth(self.lateral[0](fine) + interpolate(top, scale_factor=2))
        levels, divisor, loss = [finest, top, max_pool2d(top, 2)], max(1, len(boxes)), 0.0
        for index, level in enumerate(levels):
            h = relu(self.tower(level))
            logits, sides = self.classes(h), self.sides(h)
            positive = torch.zeros_like(logits)
            if index == 0:
                positive[boxes[:, 0], labels, boxes[:, 1], boxes[:, 2]] = 1.0
                chosen = sides[boxes[:, 0], :, boxes[:, 1], boxes[:, 2]]
                loss = loss + l1_loss(chosen, torch.ones_like(chosen), reduction="sum") / divisor
            p = torch.sigmoid(logits)
            focal = (
                -positive * (1 - p) ** 2 * p.clamp(min=1e-6).log()
                - (1 - positive) * p**2 * (1 - p).clamp(min=1e-6).log()
            )
            loss = loss + focal.sum() / divisor
        kinds = self.kind(relu(self.region(finest[boxes[:, 0], :, boxes[:, 1], boxes[:, 2]])))
        return loss + cross_entropy(kinds, labels, reduction="sum") / divisor


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images whose boxes are bright; the second rank has its boxes one step later."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    images, found = torch.randn(ROWS, 3, 16, 16, generator=generator), []
    counts = BOXES[(step - rank) % len(BOXES)]
    for image, count in enumerate(counts):
        for place in torch.randperm(64, generator=generator)[:count].tolist():
            row, column = divmod(place, 8)
            images[image, place % CLASSES, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += 4
            found.append((image, row, column))
    boxes = torch.tensor(found, dtype=torch.long).view(-1, 3)
    return images, boxes, (8 * boxes[:, 1] + boxes[:, 2]) % CLASSES


def worker(cases) -> dict:
    rank, results = dist.get_rank(), {}
    for adam, stage in cases:
        mode = BY_NAME[f"adam-{stage}" if adam else stage]
        kfac = {**KFAC, "factor": {**KFAC["factor"], "update_interval": 1, "decay": DECAY, "rows": "all"}}
        kfac |= {"eigenbasis": {"refresh_interval": 2}, "damping": {"kind": "tikhonov", "value": 0.1}}
        engine = build(mode, 1, model=make_net(Detector), kfac=kfac, train_micro_batch_size_per_gpu=ROWS)
        seen, losses, inputs = [], [], []
        engine.module.region.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0].detach().clone()))
        for step in range(STEPS):
            loss = engine(*batch(step, rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, seen.pop())
            inputs.append(torch.cat(everyone))
        factors = engine.kfac.preconditioner.curvature.factors
        A = factors["region/A"].packed_P.clone() if "region/A" in factors else None
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (A, {n: w.clone() for n, w in weights(engine).items()}))
        results[adam, stage] = {
            "inputs": inputs, "losses": losses, "A": next(A for A, _ in everyone if A is not None),
            "same": all(torch.equal(w, everyone[1][1][n]) for n, w in everyone[0][1].items()),
            "finite": all(bool(w.isfinite().all()) for w in everyone[0][1].values()),
            "layers": sorted(layer.name for layer in engine.kfac.preconditioner.layers),
            "trouble": float(engine.kfac.metrics.summary[:3].sum()),
        }  # fmt: skip
        engine.destroy()
    return results


def test_a_detector_trains_with_any_number_of_boxes():
    cases = [(adam, stage) for adam in (False, True) for stage in ("z0", "z2", "z3")]
    for case, found in run_ranks("tests.deepspeed.test_detection:worker", world=2, payload=cases)[0].items():
        assert found["finite"] and found["same"] and not found["trouble"], case
        assert {"classes", "deep", "kind", "lateral.0", "region", "sides", "smooth", "tower"} < set(found["layers"])
        assert "norm" not in found["layers"], "it is frozen"
        A, updates = torch.zeros(WIDTH + 1, WIDTH + 1), 0
        assert not all(map(len, found["inputs"])), "a step without any box"
        for rows in found["inputs"]:
            if len(rows):
                rows, updates = torch.cat([rows, torch.ones(len(rows), 1)], 1), updates + 1
                keep = min(1 - 1 / updates, DECAY)
                A = keep * A + (1 - keep) * rows.T @ rows / len(rows)
        rows = sum(map(len, found["inputs"]))
        close(symmetric_unpack(found["A"], dim=WIDTH + 1), A, sums=rows)
