"""Fisher kinds, layer types, sides, padding, moments, sums over unequally many labels, DeepSpeed's
tiles: each trains like tests/oracle.py, in ZeRO 0, 2 and 3."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import Tensor, nn
from torch.nn import functional as F

from tests import spread
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import ReferenceStep, build, reference_options, weights
from tests.models import TokenNet, TwinNet, cross_entropy, make_net, make_tokens
from tests.oracle import ReferenceKFAC
from tests.ranks import run_ranks
from tests.spread import Variation, difference, within

pytestmark = pytest.mark.distributed
STEPS, ROWS, ACCUMULATION = 4, 4, 2
ALL = ["Linear", "LayerNorm", "RMSNorm"]
TYPES = {"layers": {"types": ALL}}
CORRECTED = {"eigenvalues": "corrected", "kl_clip": 0.001}


def case(
    model=TokenNet, *, adam=False, orthogonal=False, maps=(), masked=False, items=False, **blocks
):
    """A row of the table: kfac blocks merged into the tests' own."""
    kfac = {key: {**KFAC.get(key, {}), **blocks.get(key, {})} for key in {*KFAC, *blocks}}
    mode = {"adam": adam, "orthogonal": orthogonal, "maps": dict(maps), "kfac": kfac}
    return {"model": model, "masked": masked, "items": items, "mode": mode}


class FusedNet(TokenNet):
    """Matrices of several maps, six of one shape; their outputs can be cut in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rms, self.down = (
            nn.Linear(7, 12),
            nn.RMSNorm(12),
            nn.Linear(12, 7, bias=False),
        )
        self.twins = nn.ModuleList([nn.Linear(12, 12) for _ in range(6)])

    def forward(self, tokens, labels, attention_mask=None):
        x = self.embedding(tokens)
        h = torch.tanh(self.rms(self.up(self.norm(x))))
        for twin in self.twins:
            h = h + torch.tanh(twin(h))
        return cross_entropy(self.lm_head(x + self.down(h) + 0.3 * torch.cumsum(x, dim=1)), labels)


class TrainerNet(TokenNet):
    """As Hugging Face averages: a sum over the labels of all micro-batches and ranks."""

    def forward(self, tokens: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        x = self.embedding(tokens)
        logits = self.lm_head(x + self.mlp(self.norm(x)) + 0.3 * torch.cumsum(x, dim=1))
        return (
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            / num_items_in_batch
        )

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.rms(self.up(x))))


class TiledNet(TrainerNet):
    """In tiles of a micro-batch's 12 rows, which are 4 sequences: of 6, or of 4."""

    tiles = 2

    def mlp(self, x: Tensor) -> Tensor:
        params = [p for part in (self.up, self.rms, self.down) for p in part.parameters()]
        return TiledMLP.apply(TrainerNet.mlp, self, x, self.tiles, params)


class CutNet(TiledNet):
    tiles = 3


MAPS = {"up": 3, r"twins\.\d": [2, 1, 1], "down": [2, 5]}
"""One after the other, in turn, and of unequal shapes."""


CASES = {
    "corrected": case(preconditioner=CORRECTED),
    "activations_only": case(factor={"fisher": "activations_only"}),
    "monte_carlo": case(factor={"fisher": "monte_carlo", "prediction": "lm_head"}),
    "monte_carlo-masked": case(
        factor={"fisher": "monte_carlo", "prediction": "lm_head"}, masked=True
    ),
    "reduce": case(factor={"weight_sharing": "reduce"}, **TYPES),
    "reduce-masked": case(factor={"weight_sharing": "reduce"}, masked=True, **TYPES),
    "masked": case(masked=True, **TYPES),
    "all": case(**TYPES),
    "blocks": case(factor={"dense_max": 8}),
    "diagonal": case(factor={"dense_max": 8}, plan={"LONGEST": 8}, **TYPES),
    "batched": case(TwinNet, plan={"batched": True}),
    "batched-relative": case(
        TwinNet,
        plan={"batched": True},
        preconditioner={"kl_clip": 0.001},
        damping={"kind": "relative", "value": 0.3},
    ),
    "batched-corrected": case(
        TwinNet,
        plan={"batched": True},
        preconditioner=CORRECTED,
        damping={"kind": "relative", "value": 1.0},
    ),
    "batched-adam": case(TwinNet, adam=True, plan={"batched": True}),
    "tf32": case(TwinNet, preconditioner={"precision": "tf32"}),
    "items": case(TrainerNet, items=True, **TYPES),
    "items-tiled": case(TiledNet, items=True, **TYPES),
    "items-cut": case(CutNet, items=True, **TYPES),
    "adam-all": case(adam=True, **TYPES),
    "adam-blocks": case(adam=True, factor={"dense_max": 8}),
    "adam-activations_only": case(adam=True, factor={"fisher": "activations_only"}),
    "adam-maps": case(FusedNet, adam=True, orthogonal=True, maps=MAPS),
    "batched-adam-maps": case(
        FusedNet, adam=True, orthogonal=True, maps=MAPS, plan={"batched": True}
    ),
}


def drawn(logits, labels):
    """A sampler without chance: the label after the most likely one."""
    flat = logits.reshape(-1, logits.shape[-1])
    losses = F.cross_entropy(flat, (flat.argmax(-1) + 1) % flat.shape[-1], reduction="none")
    valid = (labels.reshape(-1) >= 0).float()
    return (losses * valid).sum() / valid.sum()


def batch(step: int, settings: dict, world: int):
    """Tokens, labels and mask; each micro-batch has as many labels, or the mean over them would not
    be the whole's; of items 4 to 12."""
    tokens, labels = make_tokens(step, world * ACCUMULATION * ROWS)
    mask = None
    if settings["items"]:
        kept = (torch.arange(len(labels)) // ROWS * 5 + step) % 4  # of each row of a micro-batch
        labels[torch.arange(3) >= kept[:, None]] = -100
        labels[:, 0] = 1  # a tile without any has no gradient, so that no row of it would count
    if settings["masked"]:
        mask = torch.ones_like(tokens)
        mask[::4, 2] = 0
        labels = labels.masked_fill(mask == 0, -100)
        labels[1::4, 0] = -100
    return tokens, labels, mask


def expected_weights(
    name: str,
    mode,
    initial: dict,
    world: int,
    variation: Variation,
    kind: type[ReferenceKFAC] | None = None,
) -> dict:
    settings = CASES[name]
    kind = kind or ReferenceKFAC
    model = make_net(TokenNet if settings["items"] else settings["model"])  # in one piece
    model.load_state_dict(initial, strict=False)
    kfac = kind(model, **reference_options(mode.kfac))
    logits = {}
    model.lm_head.register_forward_hook(lambda module, x, y: logits.update(last=y))
    step = ReferenceStep(mode, model, model, kfac)
    for index in range(STEPS):
        tokens, labels, mask = variation.rows(*batch(index, settings, world))
        kfac.mask = mask
        loss = model(tokens, labels, mask)
        if kfac.fisher == "monte_carlo":
            kfac.sampled(drawn(logits["last"], labels))
        loss.backward()
        step(1.0)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def worker(payload) -> dict:
    world, rank, results = dist.get_world_size(), dist.get_rank(), {}
    expected: dict[str, spread.Expected] = {}
    for name, stages in payload:
        for stage in stages:
            settings = CASES[name]
            if stage == "z3" and settings["mode"]["kfac"]["factor"].get("fisher") == "monte_carlo":
                continue  # refused
            mode = replace(BY_NAME[stage], **copy.deepcopy(settings["mode"]))
            engine = build(
                mode,
                ACCUMULATION,
                model=make_net(settings["model"]),
                train_micro_batch_size_per_gpu=ROWS,
            )
            initial = weights(engine)
            sizes = {len(x.layers) for x in engine.kfac.preconditioner.direction.layer_groups}
            assert (max(sizes, default=1) > 1) == ("batched" in name), f"{name}: groups of {sizes}"
            if name == "tf32":
                assert "tf32 (fp32; WARNING: no TF32 on this cpu" in engine.kfac.report, (
                    engine.kfac.report
                )
            if engine.kfac.sampling:
                engine.kfac.sampler = lambda logits, reached, generator: drawn(
                    logits, reached.any(-1).long() - 1
                )
            for index in range(STEPS):
                whole = batch(index, settings, world)
                for micro in range(ACCUMULATION):
                    first = (rank * ACCUMULATION + micro) * ROWS
                    tokens, labels, mask = (
                        None if t is None else t[first : first + ROWS] for t in whole
                    )
                    # as transformers' Trainer does with average_tokens_across_devices
                    if settings["items"]:
                        loss = engine(
                            tokens, labels=labels, num_items_in_batch=(whole[1] >= 0).sum()
                        )
                        engine.backward(loss * world, scale_wrt_gas=False)
                    else:
                        engine.backward(engine(tokens, labels=labels, attention_mask=mask))
                    engine.step()
            final = weights(engine)
            if rank == 0 and name not in expected:  # every stage starts with the same weights
                expected[name] = spread.expected(
                    partial(expected_weights, name, mode, initial, world), initial
                )
            results[name, stage] = (
                difference(final, expected[name].weights, initial) if rank == 0 else 0.0,
                expected[name].bound if rank == 0 else 1.0,
                len(engine.kfac.preconditioner.layers),
                float(engine.kfac.metrics.summary.sum()),
            )
            engine.destroy()
    return results


def check(results: dict) -> None:
    wrong = []
    for (name, stage), (error, bound, _, trouble) in results.items():
        wrong += within(f"{name} {stage}", error, bound)
        if trouble:
            wrong.append(f"{name} {stage}: {trouble} layers in trouble")
    assert not wrong, "\n".join(wrong)


def test_every_feature_matches_reference():
    pairs = [("z2", "z3"), ("z0", "z3"), ("z0", "z2")]
    payload = [(name, pairs[index % 3]) for index, name in enumerate(CASES)]
    check(run_ranks("tests.deepspeed.test_features:worker", world=2, payload=payload)[0])


def test_layer_types_match_reference_on_one_and_four_ranks():
    for world, adams, other in ((1, "z3", "z2"), (4, "z2", "z3")):
        payload = [("all", (other,)), ("monte_carlo", ("z2",)), ("adam-all", (adams,))]
        check(run_ranks("tests.deepspeed.test_features:worker", world=world, payload=payload)[0])
