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
    inner: dict = field(default_factory=dict)
    """The "optimizer" block, in place of the precision's."""

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
        blocks = KFAC_ADAMW if self.adam else OPTIMIZERS
        block = copy.deepcopy(self.inner or blocks[self.precision])
        if self.adam:
            block["params"]["adam_lr"] = self.adam_ratio * block["params"]["lr"]
        return block

    @property
    def mathematics(self) -> str:
        """What decides which numbers come out, but for rounding: modes of which it is the same
        share a reference."""
        facts = vars(self) | {"stage": self.stage == 0 and self.dtype != "fp32"}
        for name in ("name", "zero", "zero_init", "fused", "wrapper"):
            del facts[name]
        return str(facts)

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

    def config(self, accumulation: int, world: int = 1) -> dict[str, Any]:
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
ADAM_PARAMS = {"lr": LR, "betas": [0.8, 0.9], "weight_decay": 0.1, "torch_adam": True}
KFAC_ADAMW = {
    precision: {"type": "KFACAdamW", "params": {**ADAM_PARAMS, "eps": eps}}
    for precision, eps in (("fp32", 0.01), ("bf16", 0.1), ("fp16", 0.1))
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FP32_ACCUM = {"data_types": {"grad_accum_dtype": "fp32"}}
SCALE = {"fp16": {"initial_scale_power": 8}}
CORRECTED = {
    "preconditioner": {**KFAC["preconditioner"], "eigenvalues": "corrected", "kl_clip": 0.001},
    "damping": {"kind": "tikhonov", "value": 0.01},
}
WORDS: dict[str, dict[str, Any]] = {
    "groups": {"groups": "decay"},
    "noclip": {"clip": 0.0},
    "clipped": {"clip": CLIPPED},
    "fused": {"fused": True},
    "offload": {"zero": OFFLOAD},
    "half": {"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "fused": True},
    "offload_param": {"zero": {**OFFLOAD, "offload_param": {"device": "cpu"}}},
    "round_robin": {"zero": {"round_robin_gradients": True}},
    "overlap": {"zero": {"overlap_comm": True, "contiguous_gradients": True}},
    "not_contiguous": {"zero": {"contiguous_gradients": False}},
    "all_reduce": {"zero": {"reduce_scatter": False}},
    "small_buckets": {"zero": {"reduce_bucket_size": 200}},
    "sub_groups": {"zero": {"sub_group_size": 100}},
    "persistence_0": {"zero": {"stage3_param_persistence_threshold": 0}},
    "zero_init": {"zero_init": True, "zero": {"stage3_param_persistence_threshold": 0}},
    "relative_damping": {"kfac": {"damping": {"kind": "relative", "value": 0.3}}},
    "corrected": {"kfac": CORRECTED},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16", "extra": SCALE},
    "accum32": {"extra": FP32_ACCUM},
    "late": {"extra": {"bf16": {"immediate_grad_update": False}}},
}
"""What a word of a mode's name sets."""
NAMES = """
z0 z0-groups z0-noclip z1 z1-groups z1-offload z1-round_robin
z2 z2-groups z2-not_contiguous z2-overlap z2-overlap-not_contiguous z2-round_robin z2-all_reduce
z2-small_buckets z2-offload z2-offload-round_robin z2-relative_damping
z3 z3-groups z3-sub_groups z3-persistence_0 z3-zero_init z3-offload z3-offload-half z3-offload_param
z0-bf16 z0-bf16-fused z1-bf16 z1-bf16-accum32 z1-bf16-accum32-late z1-bf16-offload
z2-bf16 z2-bf16-accum32 z2-bf16-offload z2-bf16-round_robin
z3-bf16 z3-bf16-accum32 z3-bf16-offload z3-bf16-zero_init
z0-fp16 z0-fp16-fused z1-fp16 z1-fp16-accum32 z2-fp16 z2-fp16-offload z3-fp16 z3-fp16-offload
z0-clipped z1-offload-clipped z2-bf16-clipped z3-clipped z1-bf16-accum32-clipped
z2-fp16-corrected z3-fp16-corrected z2-bf16-corrected z3-bf16-accum32-corrected
"""


def named(name: str) -> Mode:
    """Return the mode that a name of :data:`NAMES` describes."""
    place, *words = name.split("-")
    mode = Mode(name, stage := int(place[1]))
    for word in words:
        settings = {
            key: {**getattr(mode, key), **value} if isinstance(value, dict) else value
            for key, value in WORDS[word].items()
        }
        mode = replace(mode, **settings)
    if stage:
        wrapper = "DeepSpeedZeroOptimizer" + "_Stage3" * (stage == 3)
        if stage == 1 and mode.dtype == "bf16" and "accum32" in words:
            wrapper = "BF16_Optimizer"
    elif mode.dtype == "fp32":
        wrapper = "AdamW"
    else:
        wrapper = "FP16_Optimizer" if mode.fused else "FP16_UnfusedOptimizer"
    return replace(mode, wrapper=wrapper)


MODES = [named(name) for name in NAMES.split()]
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
