"""The optimizers that the training benchmarks compare.

A method is a function from a learning rate to its part of a DeepSpeed config. To add one, write the
function and add a line to ``METHODS`` and to ``RATES``. All methods share one schedule, whose peak
is the learning rate: 7 % linear warmup, then a cosine down to a hundredth.
"""

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
Method = Callable[[float], Config]

TABLE_RATIO = "table ratio"
"""Config key: learning rate of the token table divided by that of the other parameters."""

ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
MUON_ADAM_RATIO = 0.5
"""``adam_lr`` / ``muon_lr`` of Muon: better than 0.2 on gpt_small."""
WARMUP_PART, LAST_RATIO = 0.07, 0.01
INTERVALS = {
    "factor": {"update_interval": 10},
    "eigenbasis": {"refresh_interval": 50},
    "burn_in": {"steps": 50},
}


def adamw(rate: float) -> Config:
    # torch_adam: DeepSpeed compiles its own AdamW on a CPU, which takes minutes.
    params = {"lr": rate, **ADAM, "torch_adam": True}
    return {"optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": 1.0}


def muon(rate: float, adam_rate: float | None = None) -> Config:
    params = {
        "muon_lr": rate,
        "adam_lr": MUON_ADAM_RATIO * rate if adam_rate is None else adam_rate,
        "momentum": 0.95,
        **ADAM,
        "torch_adam": True,
    }
    return {"optimizer": {"type": "Muon", "params": params}, "gradient_clipping": 1.0}


def muon_gpt2(rate: float) -> Config:
    """Muon with the rate of heads and tables that was tuned in public for GPT-2 small."""
    return muon(rate, adam_rate=0.004)


def sgd(rate: float, nesterov: bool = True) -> Config:
    params = {"lr": rate, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 5e-4}
    return {"optimizer": {"type": "SGD", "params": params}, "gradient_clipping": 0.0}


def kfac_into_sgd(damping: Config) -> Method:
    kfac = {**INTERVALS, "damping": damping, "preconditioner": {"kl_clip": 0.01}}
    return lambda rate: {**sgd(rate), "kfac": kfac}


def kfac_cnn(rate: float) -> Config:
    """K-FAC into SGD with the settings of docs/howto/recipes.md for a ResNet."""
    kfac = {"damping": {"kind": "tikhonov", "value": 3e-2}, "preconditioner": {"kl_clip": 1e-2}}
    return {**sgd(rate), "kfac": kfac}


def kfac_kaisa(rate: float) -> Config:
    """K-FAC into SGD as kfac-pytorch's examples have it, with the intervals of KAISA's ImageNet."""
    kfac = {
        "factor": {"update_interval": 10, "decay": 0.95, "fisher": "empirical", "rows": "all"},
        "eigenbasis": {"refresh_interval": 100},
        "burn_in": {"steps": 0},
        "damping": {"kind": "tikhonov", "value": 1e-3},
        "preconditioner": {"kl_clip": 1e-3, "eigenvalues": "kronecker"},
    }
    return {**sgd(rate, nesterov=False), "kfac": kfac}


def kfac_adamw(rate: float) -> Config:
    """K-FAC's gradient into AdamW."""
    return {**adamw(rate), "kfac": INTERVALS}


def kfacadamw(rate: float) -> Config:
    params = {"lr": rate, **ADAM, "torch_adam": True}
    optimizer = {"type": "KFACAdamW", "params": params}
    return {"optimizer": optimizer, "gradient_clipping": 1.0, "kfac": INTERVALS}


def kfacadamw_unrotated(rate: float) -> Config:
    """KFACAdamW without curvature: orthogonalizes Adam's direction in the layer's coordinates."""
    return {**kfacadamw(rate), "kfac": {**INTERVALS, "adam": {"rotate": False}}}


def with_decay(method: Method, decay: float) -> Method:
    def config(rate: float) -> Config:
        found = method(rate)
        params = {**found["optimizer"]["params"], "weight_decay": decay}
        return {**found, "optimizer": {**found["optimizer"], "params": params}}

    return config


DECAYS = 0.1, 1.0, 3.0
"""Weight decays of the methods ``<method>_decay_<number>``; the others have 0.01."""
DECAYED = {
    "adamw": adamw,
    "muon": muon,
    "kfacadamw": kfacadamw,
    "kfacadamw_unrotated": kfacadamw_unrotated,
}
METHODS: dict[str, Method] = {
    "adamw": adamw,
    "adamw_table8": lambda rate: {**adamw(rate), TABLE_RATIO: 8.0},
    "muon": muon,
    "muon_gpt2": with_decay(muon_gpt2, 0.05),
    "sgd": sgd,
    "kfac_nesterov": kfac_into_sgd({"kind": "tikhonov", "value": 1e-3}),
    "kfac_relative": kfac_into_sgd({"kind": "relative", "value": 1.0}),
    "kfac_cnn": kfac_cnn,
    "kfac_kaisa": kfac_kaisa,
    "kfac_adamw": kfac_adamw,
    "kfacadamw": kfacadamw,
    "kfacadamw_unrotated": kfacadamw_unrotated,
    **{
        f"{name}_decay_{decay:g}": with_decay(method, decay)
        for name, method in DECAYED.items()
        for decay in DECAYS
    },
}

ADAM_RATES = [5e-4, 1e-3, 2e-3, 4e-3]
SGD_RATES = [0.4, 0.8, 1.6]
RATES: dict[str, list[float]] = {
    "adamw": [2.5e-4, 5e-4, 1e-3, 2e-3],
    "adamw_table8": ADAM_RATES,
    "muon": [0.01, 0.02, 0.04, 0.08],
    "muon_gpt2": [0.00625, 0.0125, 0.025],
    "sgd": SGD_RATES,
    "kfac_nesterov": SGD_RATES,
    "kfac_relative": SGD_RATES,
    "kfac_cnn": SGD_RATES,
    "kfac_kaisa": SGD_RATES,
    "kfac_adamw": ADAM_RATES,
    "kfacadamw": ADAM_RATES,
    "kfacadamw_unrotated": ADAM_RATES,
}
"""Where a sweep starts; it goes on while the best rate is at an edge."""
RATES |= {f"{name}_decay_{decay:g}": RATES[name] for name in DECAYED for decay in DECAYS}


def deepspeed_config(method: str, rate: float, task: Any, steps: int) -> Config:
    """Return the config of a run, in which ``TABLE_RATIO`` is not for DeepSpeed."""
    schedule = {
        "total_num_steps": steps,
        "warmup_num_steps": max(2, round(WARMUP_PART * steps)),
        "warmup_type": "linear",  # DeepSpeed's default is nearly at the peak after a few steps
        "warmup_min_ratio": LAST_RATIO,
        "cos_min_ratio": LAST_RATIO,
    }
    config = {
        "train_micro_batch_size_per_gpu": task.rows,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": 0},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        **task.engine,
        **METHODS[method](rate),
    }
    if task.micro_batches > 1:
        config["gradient_accumulation_steps"] = task.micro_batches
    is_muon = config.get("optimizer", {}).get("type") == "Muon"
    if is_muon and config["zero_optimization"]["stage"]:
        # At stages 1 to 3 DeepSpeed clips Muon's updates, not its gradients (docs/howto/switch.md).
        config["gradient_clipping"] = 0.0
    return config
