"""The features that are compared with tests/oracle.py, one table; and how engines and the oracle
train with them."""

import contextlib
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.assignment.costs import BUILTIN
from ds_kfac.curvature import eigen
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.model.convolutions import phase
from ds_kfac.update import rotation
from tests.choices import HALF, STAGGERED
from tests.deepspeed.modes import BY_NAME, KFAC, LR, OPTIMIZERS, Mode
from tests.deepspeed.runs import build, expected, patched, weights
from tests.deepspeed.toy_method import ROOT
from tests.deepspeed.toys import ToyRule
from tests.models import (
    CLASSES,
    FEATURES,
    TOKENS,
    VOCABULARY,
    Net,
    TokenNet,
    TwinNet,
    cross_entropy,
    make_batch,
    make_net,
    make_tokens,
)
from tests.oracle import ReferenceKFAC, _eigh, _seen
from tests.spread import difference

ROWS = 4


class FusedNet(TokenNet):
    """Matrices of several maps. Six have one shape and no bias, and their gradients lie at equal
    distances; their outputs can be cut in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rms = nn.Linear(7, 12), nn.RMSNorm(12)
        self.down = nn.Linear(12, 7, bias=False)
        self.twins = nn.ModuleList([nn.Linear(12, 12, bias=False) for _ in range(6)])

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
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / num_items_in_batch

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.rms(self.up(x))))


class TiledNet(TrainerNet):
    """In tiles of 4 of a micro-batch's 12 rows, which cut its 4 sequences."""

    def mlp(self, x: Tensor) -> Tensor:
        params = [p for part in (self.up, self.rms, self.down) for p in part.parameters()]
        return TiledMLP.apply(TrainerNet.mlp, self, x, 3, params)


class QueryNet(nn.Module):
    """Three layers see one input, two another; one input of equal values lies elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(FEATURES, 7), nn.Linear(FEATURES, 7)
        self.v, self.other = nn.Linear(FEATURES, 7, bias=False), nn.Linear(FEATURES, 7)
        self.gate, self.up = nn.Linear(7, 9), nn.Linear(7, 9)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.q(x)) * self.k(x) + self.v(x) + self.other(x.clone())
        z = self.head(torch.sigmoid(self.gate(h)) * self.up(h))
        return z if y is None else cross_entropy(z, y)


IMAGE_CLASSES = 3


class ConvNet(nn.Module):
    """Strides, groups, depthwise filters, a transposed convolution, a head that two resolutions
    share, norms of images in training and in eval mode."""

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
        self.head = nn.Conv2d(8, IMAGE_CLASSES, (3, 1), padding=(1, 0))
        for norm in (self.norm, self.frozen, self.groups):
            nn.init.normal_(norm.weight)

    def train(self, mode: bool = True) -> "ConvNet":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fine = torch.tanh(self.norm(self.stem(x)))
        coarse = torch.tanh(self.frozen(self.depthwise(torch.tanh(self.down(fine)))))
        fine = torch.tanh(self.point(torch.tanh(self.groups(self.up(coarse) + fine))))
        return cross_entropy(sum(self.head(level).mean((2, 3)) for level in (fine, coarse)), y)


def images(step: int, count: int) -> tuple[Tensor, Tensor]:
    """Images [count, 3, 6, 6] and labels."""
    generator = torch.Generator().manual_seed(3000 + step)
    x = torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float32)
    return x, torch.randint(IMAGE_CLASSES, (count,), generator=generator)


def merged(*blocks: dict) -> dict:
    """Config blocks merged key by key."""
    found: dict = {}
    for name in {name: None for block in blocks for name in block}:
        values = [block[name] for block in blocks if name in block]
        nested = isinstance(values[-1], dict)
        found[name] = {k: v for value in values for k, v in value.items()} if nested else values[-1]
    return found


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
        kfac: merged into the tests' own block.
        changes: of the engine mode.
        masked: texts are padded.
        items: micro-batches have 4 to 12 labels, and the loss is a sum over those of all.
        modes: names of engine modes; none: two of z0, z2 and z3, by turns.
        workers: that step each layer at stage 0.
        wire: what results that are rounded on their way may add to the bound.
        known: the block of the oracle, if not the engine's.
        around: a context of both runs.
        named: the optimizer in the config, if not the mode's.
        recorded: what an engine has chosen before a step, which ``before_step`` gets, too.
        check: asserts something of the engine in the end.
    """

    kfac: dict = field(default_factory=dict)
    model: type[nn.Module] = TokenNet
    changes: dict = field(default_factory=dict)
    masked: bool = False
    items: bool = False
    modes: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (2,)
    workers: int = 0
    wire: float = 0.0
    steps: int = 4
    accumulation: int = 2
    oracle: type[ReferenceKFAC] = ReferenceKFAC
    before_step: Callable | None = None
    recorded: Callable | None = None
    known: dict | None = None
    around: Callable = contextlib.nullcontext
    named: str = ""
    check: Callable[[Any], None] = lambda engine: None

    def mode(self, name: str, world: int = 1) -> Mode:
        kfac = merged(KFAC, self.kfac)
        if self.workers:
            kfac["assignment"] = {"gradient_worker_fraction": self.workers / world}
        return replace(BY_NAME[name], kfac=kfac, **self.changes)

    def batch(self, step: int, rows: int) -> dict[str, Tensor | None]:
        """Arguments of the model. Each micro-batch has as many labels, or the mean over them would
        not be the whole's; of items 4 to 12."""
        if not issubclass(self.model, TokenNet):
            x, y = images(step, rows) if self.model is ConvNet else make_batch(step, rows)
            return {"x": x, "y": y}
        tokens, labels = make_tokens(step, rows)
        if self.items:
            kept = (torch.arange(rows) // ROWS * 5 + step) % 4  # of each row of a micro-batch
            labels[torch.arange(3) >= kept[:, None]] = -100
            labels[:, 0] = 1  # a tile without any has no gradient, so that no row of it would count
            return {"tokens": tokens, "labels": labels}
        mask = None
        if self.masked:
            mask = torch.ones_like(tokens)
            mask[::4, 2] = 0
            labels = labels.masked_fill(mask == 0, -100)
            labels[1::4, 0] = -100
        return {"tokens": tokens, "labels": labels, "attention_mask": mask}


def drawn(logits: Tensor, labels: Tensor) -> Tensor:
    """A sampler without chance: the label after the most likely one."""
    flat = logits.reshape(-1, logits.shape[-1])
    losses = F.cross_entropy(flat, (flat.argmax(-1) + 1) % flat.shape[-1], reduction="none")
    valid = (labels.reshape(-1) >= 0).float()
    return (losses * valid).sum() / valid.sum()


@cache
def losses_of(name: str, world: int):
    """The oracle's: of the whole batch; of images by micro-batches, whose statistics are
    BatchNorm's."""
    feature = CASES[name]
    rows = world * feature.accumulation * ROWS
    if feature.model is Net:
        return None
    parts = world * feature.accumulation if feature.model is ConvNet else 1

    def losses(model, kfac, step, variation):
        batch, dtype = feature.batch(step, rows), next(model.parameters()).dtype
        for part in range(parts):
            own = slice(part * rows // parts, (part + 1) * rows // parts)
            values = variation.rows(*(None if t is None else t[own] for t in batch.values()))
            values = dict(zip(batch, values, strict=True))
            if "x" in values:
                values["x"] = values["x"].to(dtype)
            kfac.mask = values.get("attention_mask")
            if kfac.fisher == "monte_carlo":
                hook = model.lm_head.register_forward_hook(
                    lambda module, x, y: setattr(kfac, "z", y)
                )
            loss = model(**values)
            if kfac.fisher == "monte_carlo":
                hook.remove()
                kfac.sampled(drawn(kfac.z, values["labels"]))
            yield loss / parts

    return losses


def whole_model(feature: Feature) -> type[nn.Module]:
    """In one piece, with a mean over all labels."""
    return TokenNet if feature.items else feature.model


def train(engine, feature: Feature) -> list:
    """Train, and return what was recorded before each step."""
    history = []
    world, rank = dist.get_world_size(), dist.get_rank()
    dtype = engine.get_data_types()[0]
    for step in range(feature.steps):
        batch = feature.batch(step, world * feature.accumulation * ROWS)
        history.append(feature.recorded(engine) if feature.recorded else None)
        for micro in range(feature.accumulation):
            first = (rank * feature.accumulation + micro) * ROWS
            own = {k: None if t is None else t[first : first + ROWS] for k, t in batch.items()}
            if "x" in own:
                own["x"] = own["x"].to(dtype)
            if feature.items:  # as transformers' Trainer with average_tokens_across_devices
                loss = engine(**own, num_items_in_batch=(batch["labels"] >= 0).sum())
                engine.backward(loss * world, scale_wrt_gas=False)
            else:
                engine.backward(engine(**own))
            engine.step()
    return history


def compared(name: str, mode_name: str) -> tuple[float, float]:
    """How far an engine is from the oracle after some steps, and how far it may be. Asserts that
    all ranks have the same."""
    feature, world = CASES[name], dist.get_world_size()
    mode = feature.mode(mode_name, world)
    with feature.around(), patched(mode):
        named = (
            {"optimizer": {"type": feature.named, "params": {"lr": LR}}} if feature.named else {}
        )
        engine = build(mode, feature.accumulation, model=make_net(feature.model), **named)
        initial = weights(engine)
        if engine.kfac.sampling:
            engine.kfac.sampler = lambda logits, reached, generator: drawn(
                logits, reached.any(-1).long() - 1
            )
        history = train(engine, feature)
        final = weights(engine)
        for parameter, value in final.items():
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(value, first), f"{parameter} differs between ranks"
        assert not float(engine.kfac.metrics.summary.sum()), "layers in trouble"
        feature.check(engine)
        engine.kfac.detach()
        engine.destroy()
        if dist.get_rank():
            return 0.0, 1.0
        before_step = feature.before_step
        if feature.recorded:

            def before_step(kfac, step):
                feature.before_step(kfac, step, history[step])

        found = expected(
            mode,
            feature.accumulation,
            world,
            initial,
            steps=feature.steps,
            model=whole_model(feature),
            losses=losses_of(name, world),
            kind=feature.oracle,
            before_step=before_step,
            kfac_config=feature.known or mode.kfac,
        )
    return difference(final, found.weights, initial), found.bound + feature.wire


# what a row may check


def batched(engine) -> None:
    groups = engine.kfac.preconditioner.direction.layer_groups
    assert max(len(group.layers) for group in groups) > 1


def shares_inputs(engine) -> None:
    groups = engine.kfac.preconditioner.observations.groups
    assert groups == (("q", "k"), ("gate", "up")), groups


def cuts_its_head(engine) -> None:
    """The only layer that keeps Adam's direction, into rows, of which every rank steps some."""
    kfac = engine.kfac.preconditioner
    parts = [layer.name for layer in kfac.layers if "head" in layer.name]
    assert parts == [f"lm_head.{index}" for index in range(VOCABULARY)]
    workers = {rank for part in parts for rank in kfac.plan.assignment.workers[part]}
    assert workers == set(range(dist.get_world_size()))


def iterates(engine) -> None:
    counts = engine.kfac.preconditioner.metrics.counts
    assert counts["refreshes_iteration"] > 0 and not counts["refresh_retries"], counts


def follows_its_schedules(engine) -> None:
    kfac = engine.kfac.preconditioner
    assert kfac.metrics.counts["refreshes"] == len(REFRESHES) * len(kfac.curvature.factors)
    assert kfac.metrics.nu is None, "kl-clip is 0 in the last step"
    for text in (
        "factors every 1 steps, eigenbases every N steps, N = 4, 1 from step 6",
        "factors: decay linear 0.1 -> 0.9 over 4 steps",
        "tikhonov damping exponential 0.01 -> 1 over 4 steps",
        "burn-in: 3 steps, with factors every 1 and refreshes every 2",
    ):
        assert text in engine.kfac.report, text


# the table

ALL = {"layers": {"types": ["Linear", "LayerNorm", "RMSNorm"]}}
CORRECTED = {"preconditioner": {"eigenvalues": "corrected", "kl_clip": 0.001}}
RELATIVE = {"damping": {"kind": "relative", "value": 0.3}}
SAMPLED = {"factor": {"fisher": "monte_carlo", "prediction": "lm_head"}}
REDUCED = {"factor": {"weight_sharing": "reduce"}}
NO_G = {"factor": {"fisher": "activations_only"}}
BLOCKS = {"factor": {"dense_max": 8}}
BATCHED = {"plan": {"batched": True}}
ADAM = {"adam": True}
IN_PIECES = partial(patch.object, rotation, "AT_ONCE", 20)
"""Matrices are large: they meet eigenvalues, and change their bases, some rows at a time."""
MAPS = {"up": 3, r"twins\.\d": [2, 1, 1], "down": [2, 5]}
"""One after the other, in turn, and of unequal shapes."""
ORTHOGONAL = {"adam": True, "orthogonal": True}
SAMPLED_MODES = ("z0", "z2")
"""At stage 3 it is refused."""


CASES: dict[str, Feature] = {
    "corrected": Feature(CORRECTED, around=IN_PIECES),
    "activations_only": Feature(NO_G),
    "monte_carlo": Feature(SAMPLED, modes=SAMPLED_MODES, worlds=(1, 2, 4)),
    "monte_carlo-masked": Feature(SAMPLED, masked=True, modes=SAMPLED_MODES),
    "reduce": Feature(merged(REDUCED, ALL)),
    "reduce-masked": Feature(merged(REDUCED, ALL), masked=True),
    "masked": Feature(ALL, masked=True),
    "all": Feature(ALL, worlds=(1, 2, 4)),
    "blocks": Feature(BLOCKS),
    "diagonal": Feature(merged(BLOCKS, ALL, {"plan": {"LONGEST": 8}})),
    "batched": Feature(BATCHED, TwinNet, check=batched),
    "batched-relative": Feature(
        merged(BATCHED, RELATIVE, {"preconditioner": {"kl_clip": 0.001}}), TwinNet, check=batched
    ),
    "batched-corrected": Feature(
        merged(BATCHED, CORRECTED, {"damping": {"kind": "relative", "value": 1.0}}),
        TwinNet,
        check=batched,
    ),
    "batched-adam": Feature(BATCHED, TwinNet, ADAM, check=batched),
    "items": Feature(ALL, TrainerNet, items=True),
    "items-tiled": Feature(ALL, TiledNet, items=True),
    "adam-all": Feature(ALL, changes=ADAM, worlds=(1, 2, 4), around=IN_PIECES),
    "adam-blocks": Feature(BLOCKS, changes=ADAM),
    "adam-activations_only": Feature(NO_G, changes=ADAM, around=IN_PIECES),
    "adam-maps": Feature(model=FusedNet, changes={**ORTHOGONAL, "maps": MAPS}),
    "batched-adam-maps": Feature(
        BATCHED,
        FusedNet,
        {**ORTHOGONAL, "maps": MAPS},
        modes=("z0", "z1", "z2", "z2-not_contiguous", "z3"),
        check=batched,
    ),
    # without G its rows are stepped one by one
    "adam-head_in_parts": Feature(
        NO_G,
        changes=ORTHOGONAL,
        modes=("z0", "z1", "z2-round_robin", "z3", "z3-offload"),
        around=partial(patch.multiple, "ds_kfac.model.blocks", LARGEST=60, PART=7),
        check=cuts_its_head,
    ),
    "batched-corrected-maps": Feature(merged(BATCHED, CORRECTED), FusedNet, modes=("z2",)),
}

CONVOLUTIONS = ["Conv2d", "ConvTranspose2d"]
IMAGES = {
    "layers": {"types": [*CONVOLUTIONS, "BatchNorm", "GroupNorm"]},
    "factor": {"rows": "all"},
}
OF_IMAGES = {
    "groups": ({}, {"groups": "decay"}),
    "relative-corrected": (merged(CORRECTED, RELATIVE), {}),
    "inverse": (merged(RELATIVE, {"preconditioner": {"method": "inverse"}}), {}),
    "reduce": (REDUCED, {}),
    "adam": ({}, {**ORTHOGONAL, "groups": "decay"}),
    "adam-A": (merged(NO_G, {"layers": {"types": CONVOLUTIONS}}), ORTHOGONAL),
}
CASES |= {
    f"images-{name}": Feature(merged(IMAGES, kfac), ConvNet, changes)
    for name, (kfac, changes) in OF_IMAGES.items()
}

# strategies, and what travels

WIRE = {"communication": {"dtype": "bf16"}}
FORMS = {
    "offload": ({"offload": {"device": "cpu"}}, 0.0),
    "wire": (WIRE, 12 * 2**-8),  # A, G, A twice: 3 in 4 steps
    "half": (merged(WIRE, {"plan": HALF}), 16 * 2**-8),
}
WORLDS_OF_WORKERS = {1: (2, 4), 2: (2, 4), 3: (3,)}
with_workers = partial(Feature, model=QueryNet, modes=("z0",), check=shares_inputs)
for count, worlds in WORLDS_OF_WORKERS.items():
    for form, kfac, changes in (("", {}, {}), ("-corrected", CORRECTED, {}), ("-adam", {}, ADAM)):
        CASES[f"workers_{count}{form}"] = with_workers(
            kfac, changes=changes, worlds=worlds, workers=count
        )
# eigenbases that travel to the other workers in 16 bits, and terms that come with a shared A
for form, kfac, wire in (("wire", WIRE, 12 * 2**-8), ("no_G", NO_G, 0.0)):
    CASES[f"workers_2-corrected-{form}"] = with_workers(
        merged(CORRECTED, kfac), workers=2, wire=wire
    )
for index, (stage, (form, (kfac, wire))) in enumerate(product((0, 2, 3), FORMS.items())):
    worlds = (4, 2)[index % 2 : index % 2 + 1] + ((3,) if stage == 3 else ())
    CASES[f"stage_{stage}-{form}"] = Feature(
        kfac, QueryNet, modes=(f"z{stage}",), worlds=worlds, wire=wire, check=shares_inputs
    )

# method "inverse", with SGD: Adam would hide a wrong scale, and makes whole steps of the sign of a
# gradient that is nearly zero


def damping_by_hand(kfac: ReferenceKFAC, step: int) -> None:
    kfac.damping = 0.5 + (0.1 - 0.5) * step / 4


LINEAR = {"damping": {"value": {"schedule": "linear", "start": 0.5, "end": 0.1, "steps": 4}}}
INVERSE = {"preconditioner": {"method": "inverse"}, "burn_in": {"steps": 0}}
DAMPINGS = {"tikhonov": {"damping": {"kind": "tikhonov", "value": 0.03}}, "relative": RELATIVE}


def inverse(kind: str, *blocks: dict, **options) -> Feature:
    kfac = merged(INVERSE, DAMPINGS[kind], {"factor": {"rows": "all"}}, *blocks)
    changes = {"inner": OPTIMIZERS["bf16"]}
    return Feature(kfac, QueryNet, changes, **options)


for turn, kind in enumerate(DAMPINGS):
    CASES |= {
        f"inverse-{kind}": inverse(kind, modes=("z0", "z2"), worlds=(1, 4)),
        f"inverse-{kind}-stages": inverse(kind, modes=("z1", "z3")),
        f"inverse-{kind}-workers": inverse(kind, modes=("z0",), workers=2, worlds=(2, 4)),
        f"inverse-{kind}-blocks": inverse(
            kind, {"factor": {"dense_max": 6}}, modes=("z0",), worlds=(2 - turn, 4)
        ),
        f"inverse-{kind}-no_G": inverse(kind, NO_G, modes=("z2",), worlds=(1 + turn,)),
        f"inverse-{kind}-scheduled": inverse(
            kind, LINEAR, modes=("z3",), worlds=(2,), before_step=damping_by_hand
        ),
    }
CASES["inverse-offload"] = inverse(
    "relative", {"offload": {"device": "cpu"}}, modes=("z2",), worlds=(2, 4)
)
CASES["inverse-wire"] = inverse("relative", WIRE, modes=("z3",), wire=12 * 2**-8)

# schedules and a burn-in, against the oracle with its settings changed by hand

SCHEDULED = {
    "factor": {
        "decay": {"schedule": "linear", "start": 0.1, "end": 0.9, "steps": 4},
    },
    "eigenbasis": {"refresh_interval": {"schedule": "piecewise", "values": [4, 1], "steps": [6]}},
    "burn_in": {"steps": 3},
    "damping": {"value": {"schedule": "exponential", "start": 0.01, "end": 1, "steps": 4}},
    "preconditioner": {
        "kl_clip": {"schedule": "piecewise", "values": [0.0005, 0.002, 0], "steps": [3, 7]}
    },
}
DECAY = [0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9, 0.9]
DAMPING = [0.01, 0.01 * 100**0.25, 0.1, 0.01 * 100**0.75, 1, 1, 1, 1]
KL_CLIP = [0.0005] * 3 + [0.002] * 4 + [0]
REFRESHES = {0, 2, 3, 6, 7}  # 2: burn-in, 3: its end, 6: shorter interval at once


def settings_by_hand(kfac: ReferenceKFAC, step: int) -> None:
    kfac.decay, kfac.damping, kfac.kl_clip = DECAY[step], DAMPING[step], KL_CLIP[step]
    kfac.refresh_interval = 1 if step in REFRESHES else 8  # it refreshes at multiples of it


CASES["scheduled"] = Feature(
    SCHEDULED,
    QueryNet,
    modes=("z0", "z2", "z3"),
    steps=8,
    known=KFAC,
    before_step=settings_by_hand,
    check=follows_its_schedules,
)

# factors from the rows of some ranks, or from some rows of one


def plan_of(engine):
    return engine.kfac.preconditioner.plan


def with_those_rows(kfac: ReferenceKFAC, step: int, plan) -> None:
    """The oracle takes the rows of the ranks and places that contribute."""

    def only(layer: str, side: str) -> Tensor:
        key = f"{layer}/{side}"
        ranks = plan.contributors.of(key, plan.assignment.owners[key], step)
        here = torch.isin(kfac.ranks, torch.tensor(list(ranks)))
        # [N, T], of its call
        row = (kfac.places % ROWS)[:, None] * TOKENS + torch.arange(TOKENS)
        every = plan.contributors.strides.get(key, 1)
        taken = row % every == phase(step, every)
        return (here[:, None] & taken).flatten() * (every * plan.assignment.world / len(ranks))

    kfac.only = only


def contribute(count: int, stride: int, engine) -> None:
    """Once the rows are known, so many ranks contribute, each one of ``stride`` rows."""
    plan, keys = plan_of(engine), engine.kfac.preconditioner.curvature.specs
    world = dist.get_world_size()
    counts = {plan.contributors.counts.get(key, world) for key in keys}
    assert counts == {min(count, world)}
    assert set(plan.contributors.strides.values()) == ({stride} if stride > 1 else set())


def some_rows(modes: str, count: int, rows: int | str, *blocks: dict, stride: int = 1, **options):
    return Feature(
        merged({"factor": {"rows": rows}}, *blocks),
        Net,
        steps=6,
        modes=tuple(modes.split()),
        recorded=plan_of,
        before_step=with_those_rows,
        check=partial(contribute, count, stride),
        **{"accumulation": 1, "worlds": (4,), **options},
    )


OWN = TOKENS * ROWS
"""Rows of a micro-batch."""
SMALL = {"plan": {"BUCKET_BYTES": 512}}
"""Too small for all sums: the first batch comes from the owners alone, later ones in several
messages."""
ALL_WORKERS = {"assignment": {"gradient_worker_fraction": 1.0}}
CASES |= {
    "rows-one": some_rows("z0 z2", 1, OWN),
    "rows-one-workers": some_rows("z0", 1, OWN, ALL_WORKERS, worlds=(2,)),
    "rows-one-adam": some_rows("z3", 1, 4 * OWN, changes=ADAM, accumulation=4, worlds=(2,)),
    "rows-two": some_rows("z3", 2, 2 * OWN),
    "rows-two-accumulated": some_rows("z2", 2, 5 * OWN, CORRECTED, accumulation=4),
    "rows-two-inverse": some_rows("z1", 2, 2 * OWN, {"preconditioner": {"method": "inverse"}}),
    "rows-two-small": some_rows("z3", 2, 2 * OWN, SMALL),
    "rows-four-small": some_rows("z2", 4, "all", SMALL),
    "rows-strided": some_rows("z2", 1, OWN // 3, CORRECTED, stride=3, worlds=(1, 2)),
    "rows-strided-adam": some_rows("z0", 1, OWN // 5, stride=6, changes=ADAM, worlds=(2,)),
    "rows-strided-accumulated": some_rows(
        "z3", 1, 4 * OWN // 7, SMALL, stride=8, accumulation=4, worlds=(2,)
    ),
}

# factors that are captured and refreshed one by one; whose turn it is, is tested in tests/schedule


class Timed(ReferenceKFAC):
    """Factors are due as an engine has them: {key: weight of the past} to capture, and keys to
    refresh."""

    captures: dict[str, float] = {}
    refreshes: frozenset[str] = frozenset()

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, int] = {}

    def update(self) -> None:
        for name, layer in self.layers.items():
            layer.damping, batch = self.damping, layer.batch()
            layer.factors = layer.factors or [torch.zeros_like(part) for part in batch]
            layer.bases = layer.bases or [
                (torch.ones(len(part)), torch.eye(len(part))) for part in batch
            ]
            for index, key in enumerate((f"{name}/A", f"{name}/G")):
                if key in self.captures:
                    self.counts[key] = self.counts.get(key, 0) + 1
                    r = min(1 - 1 / self.counts[key], self.captures[key])
                    layer.factors[index] = r * layer.factors[index] + (1 - r) * batch[index]
                if key in self.refreshes:
                    layer.bases[index] = _eigh(layer.factors[index], layer.blocks[index])
        self.passes.clear()
        self.steps += 1


def due_in(engine) -> tuple[dict[str, float], frozenset[str]]:
    kfac = engine.kfac.preconditioner
    decay, clocks = kfac.config.factor.decay.at(kfac.steps), kfac.curvature.timetable.clocks
    captures = {key: decay ** clocks[key].interval for key in kfac.due.capture}
    return captures, frozenset(kfac.due.refresh)


def as_due(kfac: Timed, step: int, due) -> None:
    kfac.captures, kfac.refreshes = due


def skips_captures(adaptive: bool, engine) -> None:
    assert (engine.kfac.counters()["captures_skipped"] > 0) == adaptive


SPREAD, ADAPTIVE = {"plan": STAGGERED}, {"adaptive": 0.9}  # such batches differ by more than 0.1
ONE_BY_ONE = {
    "factor": {"rows": "all", "update_interval": 2, "decay": 0.8},
    "eigenbasis": {"refresh_interval": 4},
    "burn_in": {"steps": 0},
}
OFFLOADED = {**SPREAD, **ADAPTIVE, "offload": {"device": "cpu"}}
INVERSES = merged(
    OFFLOADED, {"preconditioner": {"method": "inverse", "kl_clip": 5e-4}}, DAMPINGS["relative"]
)
for name, names, blocks in (
    ("staggered", "z0 z2 z3", SPREAD),
    ("adaptive", "z0 z2 z3", ADAPTIVE),
    ("staggered-adaptive-offload", "z0 z3", OFFLOADED),
    ("staggered-adaptive-inverse", "z2 z3", INVERSES),
):
    CASES[name] = Feature(
        merged(ONE_BY_ONE, blocks),
        Net,
        steps=14,
        accumulation=1,
        modes=tuple(names.split()),
        oracle=Timed,
        recorded=due_in,
        before_step=as_due,
        check=partial(skips_captures, "adaptive" in name),
    )

# KFACAdamW's refreshes as on a GPU, from the last eigenbasis

CPU = frozenset({"cpu"})


@contextmanager
def as_on_a_gpu():
    """Refreshes on this CPU, and the plan's rates, are those of a GPU; and so is the oracle."""
    rates = replace(BUILTIN["cpu"], ieee_flops=1e11)
    with ExitStack() as stack:
        stack.enter_context(patch.object(eigen, "GROUPED", CPU))
        stack.enter_context(patch.object(ReferenceKFAC, "iterates", CPU))
        stack.enter_context(patch.dict(BUILTIN, {"cpu": rates}))
        yield


ITERATED = {
    "iterated": (NO_G, ("z0", "z1")),
    "iterated-with_G": ({}, ("z2",)),
    "iterated-blocks": (merged(NO_G, BLOCKS), ("z3",)),
}
for name, (kfac, names) in ITERATED.items():
    CASES[name] = Feature(
        merged({"burn_in": {"steps": 0}}, kfac),
        changes=ORTHOGONAL,
        modes=names,
        around=as_on_a_gpu,
        check=iterates,
    )

# a rule and a method that no other file of ds_kfac knows


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


@contextmanager
def with_toy():
    DIRECTIONS.insert(0, ToyRule())
    try:
        yield
    finally:
        del DIRECTIONS[0]


def toy(modes: str, **blocks) -> Feature:
    return Feature(
        merged({"preconditioner": {"kl_clip": 0}}, blocks),
        Net,
        {"inner": SGD},
        modes=tuple(modes.split()),
        named="ToySGD",
        oracle=ReferenceRule,
        around=with_toy,
    )


SGD = {"type": "SGD", "params": {"lr": LR}}
CASES |= {
    "toy": toy("z0 z3 z1-fp16 z0-clipped z1-offload-clipped z2-bf16-clipped z3-clipped"),
    "toy-batched": toy("z2", **BATCHED),
    "toy-method": Feature(
        {"preconditioner": {"kl_clip": 0, "method": "inverse"}},
        Net,
        {"inner": SGD},
        modes=("z0", "z3", "z2-fp16", "z2-bf16"),
        oracle=ReferenceMethod,
        # the config knows no other name
        around=partial(patch.dict, METHODS, {"inverse": ROOT}),
    ),
}


def rows() -> list[tuple[str, str, int]]:
    """Return (name, engine mode, ranks) of every comparison."""
    turns = (("z2", "z3"), ("z0", "z3"), ("z0", "z2"))
    found = []
    for index, (name, feature) in enumerate(CASES.items()):
        modes = feature.modes or turns[index % 3]
        found += [(name, mode, world) for world in feature.worlds for mode in modes]
    return found
