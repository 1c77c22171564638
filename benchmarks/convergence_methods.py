"""The optimizers of the convergence benchmark: name -> learning rate -> their part of a DeepSpeed config.

A method is a function, a line in ``METHODS`` and a line in ``RATES``. The learning rate is the peak of one schedule
that all share: 7 % linear warmup, then a cosine down to a hundredth.
"""

from collections.abc import Callable

INTERVALS = {
    "factor": {"update_interval": 10},
    "eigenbasis": {"refresh_interval": 50},
    "burn_in": {"steps": 50, "update_interval": 5, "refresh_interval": 10},
}
KFAC_FOR_SGD = {**INTERVALS}
KFAC_FOR_ADAMW = {**INTERVALS}
KFAC_FOR_KFACADAMW = {**INTERVALS}
VARIATIONS = {
    "plain": {"factor": {"update_interval": 10, "fisher": "empirical"},
              "adam": {"orthogonalize": False, "nesterov": False}},
    "empirical": {"factor": {"update_interval": 10, "fisher": "empirical"}},
    "unrotated": {"factor": {"update_interval": 10, "max_dim": 2, "large_input": "identity"}},
    "no_nesterov": {"adam": {"nesterov": False}},
    "no_burn_in": {"burn_in": {"steps": 0}},
    "all_types": {"layers": {"types": ["Linear", "Embedding", "LayerNorm"]},
                  "factor": {"update_interval": 10, "fisher": "empirical"}},
}  # fmt: skip
"""KFACAdamW with one thing changed, to see what it is worth. plain: Adam in the eigenbasis of A and G. unrotated: no
curvature at all, orthogonalized Adam in the layers' own coordinates."""

ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
MUON_ADAM_RATIO = 0.5
"""Rate of Muon's Adam half (embeddings, head, norms) to that of its matrices: better than 0.2 on gpt_small."""
WARMUP_PART, LAST_RATIO = 0.07, 0.01


def adamw(rate: float) -> dict:
    # torch's: DeepSpeed's own is compiled on a CPU, which takes minutes
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": rate, **ADAM, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }


def muon(rate: float) -> dict:
    params = {"muon_lr": rate, "adam_lr": MUON_ADAM_RATIO * rate, "momentum": 0.95, **ADAM, "torch_adam": True}
    return {"optimizer": {"type": "Muon", "params": params}, "gradient_clipping": 1.0}


def kfac_sgd(rate: float) -> dict:
    # no weight decay: at SGD's rates the same number would decay a hundred times as much; no clipping: kl-clip bounds
    params = {"lr": rate, "momentum": 0.9, "weight_decay": 0.0}
    return {"optimizer": {"type": "SGD", "params": params}, "kfac": KFAC_FOR_SGD}


def kfac_adamw(rate: float) -> dict:
    return {**adamw(rate), "kfac": KFAC_FOR_ADAMW}


def kfacadamw(rate: float) -> dict:
    optimizer = {"type": "KFACAdamW", "params": {"lr": rate, **ADAM, "torch_adam": True}}
    return {"optimizer": optimizer, "gradient_clipping": 1.0, "kfac": KFAC_FOR_KFACADAMW}


def varied(name: str) -> Callable[[float], dict]:
    """A method ``kfacadamw_<name>``."""
    return lambda rate: {**kfacadamw(rate), "kfac": {**KFAC_FOR_KFACADAMW, **VARIATIONS[name]}}


METHODS: dict[str, Callable[[float], dict]] = {
    "adamw": adamw,
    "muon": muon,
    "kfac_sgd": kfac_sgd,
    "kfac_adamw": kfac_adamw,
    "kfacadamw": kfacadamw,
    **{f"kfacadamw_{name}": varied(name) for name in VARIATIONS},
}

DEFAULT_METHODS = ["adamw", "muon", "kfac_sgd", "kfac_adamw", "kfacadamw"]
"""The others show what a part of KFACAdamW is worth."""

RATES: dict[str, list[float]] = {
    "adamw": [2.5e-4, 5e-4, 1e-3, 2e-3],
    "muon": [0.01, 0.02, 0.04, 0.08],
    "kfac_sgd": [0.1, 0.2, 0.4, 0.8],
    "kfac_adamw": [5e-4, 1e-3, 2e-3, 4e-3],
    "kfacadamw": [4e-3, 8e-3, 1.6e-2, 3.2e-2],
    **{f"kfacadamw_{name}": [4e-3, 8e-3, 1.6e-2, 3.2e-2] for name in VARIATIONS},
}
"""Where a sweep starts; it extends itself while the best is at an edge."""


def deepspeed_config(method: str, rate: float, *, rows: int, steps: int, stage: int) -> dict:
    """The whole config of a run: fp32, one micro-batch a step."""
    schedule = {
        "total_num_steps": steps,
        "warmup_num_steps": max(2, round(WARMUP_PART * steps)),
        "warmup_type": "linear",  # DeepSpeed's default is a logarithm, nearly at the peak after a few steps
        "warmup_min_ratio": LAST_RATIO,
        "cos_min_ratio": LAST_RATIO,
    }
    return {
        "train_micro_batch_size_per_gpu": rows,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": stage},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        **METHODS[method](rate),
    }
