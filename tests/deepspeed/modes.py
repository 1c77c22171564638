"""Every engine mode as a DeepSpeed config, one table; and the runs that are compared with
tests/oracle.py."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

KFAC = {
    "factor": {"update_interval": 1, "decay": 0.9, "fisher": "empirical", "rows": "all"},
    "eigenbasis": {"refresh_interval": 2},
    "damping": {"kind": "tikhonov", "value": 0.03},
    "preconditioner": {"kl_clip": 0.0005, "precision": "highest"},
}
"""In fp32 on GPUs, too: by default their products are in TF32, and a step's orthogonalization in
fp16."""
STEPS, MICRO_ROWS, LR, CLIP = 4, 4, 0.02, 0.5
CLIPPED = 0.01
"""A tenth and less of these gradients' norms."""


@dataclass(frozen=True)
class Mode:
    """A row of the table. ``zero`` goes to zero_optimization, ``extra`` to the top level."""

    name: str
    stage: int
    dtype: str = "fp32"
    zero: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    kfac: dict = field(default_factory=dict)
    groups: str = "one"
    """one: model.parameters(); decay: biases and norms without weight decay."""
    zero_init: bool = False
    fused: bool = False
    """Make DeepSpeed take what it takes for its own compiled optimizers: FP16_Optimizer, partial
    offload."""
    wrapper: str = ""
    """Expected class of engine.optimizer."""
    clip: float = CLIP
    adam: bool = False
    """KFACAdamW instead of the precision's optimizer."""
    orthogonal: bool = False
    """With orthogonalized directions of all but heads; else all layers keep Adam's."""
    whiten: float = 0.25
    rotate: bool = True
    size: float = 1.0
    """Of steps, and ``base``: constants, smaller for layers of ten columns."""
    base: int = 10
    adam_ratio: float = 1.0
    maps: dict = field(default_factory=dict)
    """``adam.blocks``."""

    @property
    def precision(self) -> str:
        """Of forward and backward: chooses the optimizer."""
        return {"bfloat16": "bf16", "float16": "fp16"}.get(
            self.extra.get("torch_autocast", {}).get("dtype"), self.dtype
        )

    @property
    def kfac_block(self) -> dict[str, Any]:
        """Of a rule without curvature without the Fisher."""
        factor = {
            key: value for key, value in KFAC["factor"].items() if self.rotate or key != "fisher"
        }
        adam = {"whiten": self.whiten, "rotate": self.rotate, "blocks": self.maps}
        adam |= {} if self.orthogonal else {"except_layers": [".*"]}
        return {**KFAC, "factor": factor, "adam": adam, **self.kfac}

    @property
    def optimizer(self) -> dict[str, Any]:
        block = copy.deepcopy(
            KFAC_ADAMW[self.precision] if self.adam else OPTIMIZERS[self.precision]
        )
        if self.adam:
            block["params"]["adam_lr"] = self.adam_ratio * block["params"]["lr"]
        return block

    @property
    def mathematics(self) -> str:
        """What decides which numbers come out, but for rounding: modes of which it is the same
        share a reference."""
        stage_0 = self.stage == 0 and self.dtype != "fp32"
        facts = {"stage 0": stage_0, "kfac": self.kfac, "groups": self.groups, "dtype": self.dtype}
        facts |= {
            "clip": self.clip,
            "adam": self.adam,
            "orthogonal": self.orthogonal,
            "extra": self.extra,
        }
        facts |= {"whiten": self.whiten, "rotate": self.rotate, "maps": self.maps}
        return str(facts | {"size": self.size, "base": self.base, "ratio": self.adam_ratio})

    @property
    def factors(self) -> dict[str, str]:
        """What a choice of cases combines, see tests/covering.py."""
        return {
            "rule": str((self.adam, self.orthogonal, self.rotate)),
            "moments": str((self.whiten, self.size, self.adam_ratio) if self.adam else ""),
            "stage": str(self.stage),
            "dtype": f"{self.dtype} {self.precision}",
            "settings": str((self.zero, self.extra, self.kfac)),
            "optimizer": str((self.groups, self.fused, self.clip)),
            "zero_init": str(self.zero_init),
        }

    def config(self, accumulation: int, world: int) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": MICRO_ROWS,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": self.clip,
            "steps_per_print": None,
            "zero_optimization": {"stage": self.stage, **copy.deepcopy(self.zero)},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": self.optimizer,
            "kfac": self.kfac_block,
            **copy.deepcopy(self.extra),
        }
        if self.dtype in ("bf16", "fp16"):
            config[self.dtype] = {"enabled": True, **config.get(self.dtype, {})}
        return config


# 16 bits: SGD, because Adam's first steps are sign(gradient), which turns rounding into whole steps
OPTIMIZERS = {
    "fp32": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1, "torch_adam": True}},
    "bf16": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
    "fp16": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
}
# 16 bits: an eps of about a gradient's size, for the same reason
KFAC_ADAMW = {
    precision: {
        "type": "KFACAdamW",
        "params": {
            "lr": LR,
            "betas": [0.8, 0.9],
            "eps": eps,
            "weight_decay": 0.1,
            "torch_adam": True,
        },
    }
    for precision, eps in (("fp32", 0.01), ("bf16", 0.1), ("fp16", 0.1))
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FP32_ACCUM = {"data_types": {"grad_accum_dtype": "fp32"}}
SCALE = {"fp16": {"initial_scale_power": 8}}
CORRECTED = {
    "preconditioner": {**KFAC["preconditioner"], "eigenvalues": "corrected", "kl_clip": 0.001},
    "damping": {"kind": "tikhonov", "value": 0.01},
}
Z12, Z3 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"

MODES = [
    Mode("z0", 0, wrapper="AdamW"),
    Mode("z0-groups", 0, groups="decay", wrapper="AdamW"),
    Mode("z0-noclip", 0, clip=0.0, wrapper="AdamW"),
    Mode("z1", 1, wrapper=Z12),
    Mode("z1-groups", 1, groups="decay", wrapper=Z12),
    Mode("z1-offload", 1, zero=OFFLOAD, wrapper=Z12),
    Mode("z1-round_robin", 1, zero={"round_robin_gradients": True}, wrapper=Z12),
    Mode("z2", 2, wrapper=Z12),
    Mode("z2-groups", 2, groups="decay", wrapper=Z12),
    Mode("z2-not_contiguous", 2, zero={"contiguous_gradients": False}, wrapper=Z12),
    Mode("z2-overlap", 2, zero={"overlap_comm": True, "contiguous_gradients": True}, wrapper=Z12),
    Mode(
        "z2-overlap-not_contiguous",
        2,
        zero={"overlap_comm": True, "contiguous_gradients": False},
        wrapper=Z12,
    ),
    Mode("z2-round_robin", 2, zero={"round_robin_gradients": True}, wrapper=Z12),
    Mode("z2-all_reduce", 2, zero={"reduce_scatter": False}, wrapper=Z12),
    Mode("z2-small_buckets", 2, zero={"reduce_bucket_size": 200}, wrapper=Z12),
    Mode("z2-offload", 2, zero=OFFLOAD, wrapper=Z12),
    Mode("z2-offload-round_robin", 2, zero={**OFFLOAD, "round_robin_gradients": True}, wrapper=Z12),
    Mode(
        "z2-relative_damping", 2, kfac={"damping": {"kind": "relative", "value": 0.3}}, wrapper=Z12
    ),
    Mode("z3", 3, wrapper=Z3),
    Mode("z3-groups", 3, groups="decay", wrapper=Z3),
    Mode("z3-sub_groups", 3, zero={"sub_group_size": 100}, wrapper=Z3),
    Mode("z3-persistence_0", 3, zero={"stage3_param_persistence_threshold": 0}, wrapper=Z3),
    Mode(
        "z3-zero_init",
        3,
        zero_init=True,
        zero={"stage3_param_persistence_threshold": 0},
        wrapper=Z3,
    ),
    Mode("z3-offload", 3, zero=OFFLOAD, wrapper=Z3),
    Mode(
        "z3-offload-half",
        3,
        zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        fused=True,
        wrapper=Z3,
    ),
    Mode("z3-offload_param", 3, zero={**OFFLOAD, "offload_param": {"device": "cpu"}}, wrapper=Z3),
    Mode("z0-bf16", 0, "bf16", wrapper="FP16_UnfusedOptimizer"),
    Mode("z0-bf16-fused", 0, "bf16", fused=True, wrapper="FP16_Optimizer"),
    Mode("z1-bf16", 1, "bf16", wrapper=Z12),
    Mode("z1-bf16-accum32", 1, "bf16", extra=FP32_ACCUM, wrapper="BF16_Optimizer"),
    Mode(
        "z1-bf16-accum32-late",
        1,
        "bf16",
        extra={**FP32_ACCUM, "bf16": {"immediate_grad_update": False}},
        wrapper="BF16_Optimizer",
    ),
    Mode("z1-bf16-offload", 1, "bf16", zero=OFFLOAD, wrapper=Z12),
    Mode("z2-bf16", 2, "bf16", wrapper=Z12),
    Mode("z2-bf16-accum32", 2, "bf16", extra=FP32_ACCUM, wrapper=Z12),
    Mode("z2-bf16-offload", 2, "bf16", zero=OFFLOAD, wrapper=Z12),
    Mode("z2-bf16-round_robin", 2, "bf16", zero={"round_robin_gradients": True}, wrapper=Z12),
    Mode("z3-bf16", 3, "bf16", wrapper=Z3),
    Mode("z3-bf16-accum32", 3, "bf16", extra=FP32_ACCUM, wrapper=Z3),
    Mode("z3-bf16-offload", 3, "bf16", zero=OFFLOAD, wrapper=Z3),
    Mode("z3-bf16-zero_init", 3, "bf16", zero_init=True, wrapper=Z3),
    Mode("z0-fp16", 0, "fp16", extra=SCALE, wrapper="FP16_UnfusedOptimizer"),
    Mode("z0-fp16-fused", 0, "fp16", extra=SCALE, fused=True, wrapper="FP16_Optimizer"),
    Mode("z1-fp16", 1, "fp16", extra=SCALE, wrapper=Z12),
    Mode("z1-fp16-accum32", 1, "fp16", extra={**SCALE, **FP32_ACCUM}, wrapper=Z12),
    Mode("z2-fp16", 2, "fp16", extra=SCALE, wrapper=Z12),
    Mode("z2-fp16-offload", 2, "fp16", extra=SCALE, zero=OFFLOAD, wrapper=Z12),
    Mode("z3-fp16", 3, "fp16", extra=SCALE, wrapper=Z3),
    Mode("z3-fp16-offload", 3, "fp16", extra=SCALE, zero=OFFLOAD, wrapper=Z3),
    Mode("z0-clipped", 0, clip=CLIPPED, wrapper="AdamW"),
    Mode("z1-offload-clipped", 1, zero=OFFLOAD, clip=CLIPPED, wrapper=Z12),
    Mode("z2-bf16-clipped", 2, "bf16", clip=CLIPPED, wrapper=Z12),
    Mode("z3-clipped", 3, clip=CLIPPED, wrapper=Z3),
    Mode(
        "z1-bf16-accum32-clipped",
        1,
        "bf16",
        extra=FP32_ACCUM,
        clip=CLIPPED,
        wrapper="BF16_Optimizer",
    ),
    Mode("z2-fp16-corrected", 2, "fp16", extra=SCALE, kfac=CORRECTED, wrapper=Z12),
    Mode("z3-fp16-corrected", 3, "fp16", extra=SCALE, kfac=CORRECTED, wrapper=Z3),
    Mode("z2-bf16-corrected", 2, "bf16", kfac=CORRECTED, wrapper=Z12),
    Mode("z3-bf16-accum32-corrected", 3, "bf16", extra=FP32_ACCUM, kfac=CORRECTED, wrapper=Z3),
]
AUTOCAST = [
    Mode(
        f"z{stage}-autocast_{dtype}",
        stage,
        clip=0.0 if dtype == "float16" else CLIP,
        extra={"torch_autocast": {"enabled": True, "dtype": dtype}},
    )
    for dtype in ("bfloat16", "float16")
    for stage in (0, 1, 2, 3)
]
# DeepSpeed gives partial offload a second, plain AdamW: refused. Every other one orthogonalized, in
# fp32 only: it lifts small singular values up to the large ones, and their rounding with them.
ADAM = [
    replace(
        mode,
        name=f"adam-{mode.name}",
        adam=True,
        wrapper="",
        orthogonal=index % 2 == 1 and mode.dtype == "fp32",
        whiten=(0.25, 0.0, 0.5)[index // 2 % 3],
        size=(1.0, 2.0)[index // 2 % 2],
        adam_ratio=(1.0, 1.0, 0.5)[index % 3],
    )
    for index, mode in enumerate(MODES)
    if "half" not in mode.name and "corrected" not in mode.name
] + [
    Mode(f"adam-z{stage}-unrotated", stage, adam=True, orthogonal=True, rotate=False)
    for stage in (0, 1, 2, 3)
]
ADAM_AUTOCAST = [replace(mode, name=f"adam-{mode.name}", adam=True) for mode in AUTOCAST]
BY_NAME = {mode.name: mode for mode in MODES + AUTOCAST + ADAM + ADAM_AUTOCAST}
