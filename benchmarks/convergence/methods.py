"""The optimizers of the convergence benchmark: name -> learning rate -> their part of a DeepSpeed
config.

A method is a function, a line in ``METHODS`` and a line in ``RATES``. The learning rate is the peak
of one schedule that all share: 7 % linear warmup, then a cosine down to a hundredth.
"""

from collections.abc import Callable

INTERVALS = {
    "factor": {"update_interval": 10},
    "eigenbasis": {"refresh_interval": 50},
    "burn_in": {"steps": 50},
}
KFAC_FOR_SGD = {**INTERVALS}
KFAC_FOR_ADAMW = {**INTERVALS}
KFAC_FOR_KFACADAMW = {**INTERVALS}
KFAC_FOR_IMAGES = {
    **INTERVALS,
    "damping": {"kind": "tikhonov", "value": 1e-3},
    "preconditioner": {"kl_clip": 0.01},
}
VARIATIONS = {
    "plain": {
        "factor": {"update_interval": 10, "fisher": "empirical"},
        "adam": {"except_layers": [".*"]},
    },
    "empirical": {"factor": {"update_interval": 10, "fisher": "empirical"}},
    "unrotated": {"adam": {"rotate": False}},
    "unwhitened": {"adam": {"whiten": 0.0}},
    "fused": {"adam": {"blocks": {".*": 1}}},
    "heads": {"adam": {"blocks": {"qkv": 12}}},
    "blocks": {"factor": {"update_interval": 10, "dense_max": 256}},
    "no_burn_in": {"burn_in": {"steps": 0}},
    "i20": {"factor": {"update_interval": 20}, "eigenbasis": {"refresh_interval": 100}},
    "i20_40": {"factor": {"update_interval": 20}, "eigenbasis": {"refresh_interval": 40}},
}
"""KFACAdamW with one thing changed, to see what it is worth. plain: Adam in the eigenbasis of A and
G (with Nesterov's momentum). unrotated: no curvature at all, orthogonalized Adam in the layers' own
coordinates. fused: queries, keys and values are one matrix, as is a gate with what it gates. heads:
each head's queries, keys and values by themselves. i20, i20_40: factors every 20 and eigenbases
every 100 or 40 steps."""
KFAC_ADAMW_VARIATIONS = {
    "corrected": {"preconditioner": {"eigenvalues": "corrected"}},
}
"""K-FAC's gradient into AdamW, with one thing changed."""

DECAYS = 0.1, 0.3, 1.0, 3.0
"""Weight decays of the methods ``<method>_decay_<number>``; all others have 0.01."""
DECAYED = ["adamw", "muon", "kfacadamw", "kfacadamw_unrotated"]

RAMP = "ramp"
"""Key for the parts of the bytes after which a batch doubles."""
RAMPED = ["adamw", "kfacadamw", "kfacadamw_decay_1", "kfacadamw_unrotated_decay_1"]
RAMP_AT = 0.2, 0.4
"""Those of the methods ``<method>_ramp``, to 4 times the batch."""

ADAM_RATIOS = 1, 2
"""adam_lr / lr of the methods ``<method>_adam_<number>``; all others have 8, the default."""
TRAINED = ["kfacadamw", "kfacadamw_unrotated"]

CLIENT = "client"
"""Key for an optimizer of the package pytorch-optimizer, (class, parameters), which DeepSpeed is
given as an object."""
TABLE_RATE = "rate of the bytes' table"
"""Key for the rate of the embedding of bytes, as a part of what it would be."""
ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
MUON_ADAM_RATIO = 0.5
"""Rate of Muon's Adam half (embeddings, head, norms) to that of its matrices: better than 0.2 on
gpt_small."""
WARMUP_PART, LAST_RATIO = 0.07, 0.01


def adamw(rate: float) -> dict:
    # torch's: DeepSpeed's own is compiled on a CPU, which takes minutes
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": rate, **ADAM, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }


def muon(rate: float) -> dict:
    params = {
        "muon_lr": rate,
        "adam_lr": MUON_ADAM_RATIO * rate,
        "momentum": 0.95,
        **ADAM,
        "torch_adam": True,
    }
    return {"optimizer": {"type": "Muon", "params": params}, "gradient_clipping": 1.0}


def kfac_sgd(rate: float) -> dict:
    # no weight decay: at SGD's rates the same number would decay a hundred times as much; no
    # clipping (DeepSpeed's default is 1): kl-clip bounds
    params = {"lr": rate, "momentum": 0.9, "weight_decay": 0.0}
    return {
        "optimizer": {"type": "SGD", "params": params},
        "gradient_clipping": 0.0,
        "kfac": KFAC_FOR_SGD,
    }


def sgd(rate: float) -> dict:
    params = {"lr": rate, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    return {"optimizer": {"type": "SGD", "params": params}, "gradient_clipping": 0.0}


def kfac_nesterov(rate: float) -> dict:
    return {**sgd(rate), "kfac": KFAC_FOR_IMAGES}


def kfac_relative(rate: float) -> dict:
    return {**sgd(rate), "kfac": {**KFAC_FOR_IMAGES, "damping": {"kind": "relative", "value": 1.0}}}


def kfac_adamw(rate: float) -> dict:
    return {**adamw(rate), "kfac": KFAC_FOR_ADAMW}


def kfacadamw(rate: float) -> dict:
    optimizer = {"type": "KFACAdamW", "params": {"lr": rate, **ADAM, "torch_adam": True}}
    return {"optimizer": optimizer, "gradient_clipping": 1.0, "kfac": KFAC_FOR_KFACADAMW}


def soap(rate: float) -> dict:
    params = {"lr": rate, "betas": [0.95, 0.95], "precondition_frequency": 10, "weight_decay": 0.01}
    return {CLIENT: ("SOAP", params), "gradient_clipping": 1.0}


def shampoo(rate: float) -> dict:
    # norms grafted from RMSProp, as in the AlgoPerf submission: its own are of no use to a rate
    # that suits Adam
    params = {
        "lr": rate,
        "betas": [0.9, 0.95],
        "weight_decay": 0.01,
        "decoupled_weight_decay": True,
        "graft_type": 3,
        "preconditioning_compute_steps": 10,
        "start_preconditioning_step": 10,
        "moving_average_for_momentum": True,
    }
    return {CLIENT: ("ScalableShampoo", params), "gradient_clipping": 1.0}


def muon_filters(rate: float) -> dict:
    """A package's: DeepSpeed's Muon fails at filters. Theirs are matrices [O, I k k]; sizes as in
    Moonlight."""
    params = {
        "lr": rate,
        "adamw_lr": MUON_ADAM_RATIO * rate,
        "weight_decay": 0.01,
        "use_adjusted_lr": True,
    }
    return {CLIENT: ("Muon", params), "gradient_clipping": 1.0}


def varied(name: str) -> Callable[[float], dict]:
    """A method ``kfacadamw_<name>``."""
    return lambda rate: {**kfacadamw(rate), "kfac": {**KFAC_FOR_KFACADAMW, **VARIATIONS[name]}}


def table_at(method: str, ratio: float) -> Callable[[float], dict]:
    """A method whose bytes' embeddings have ``ratio`` times the rate that they would have.
    ``<method>_slow_table``: a quarter of adam_lr, so 2 lr."""
    return lambda rate: {**METHODS[method](rate), TABLE_RATE: ratio}


def decayed(method: str, decay: float) -> Callable[[float], dict]:
    """A method ``<method>_decay_<number>``."""

    def config(rate: float) -> dict:
        found = METHODS[method](rate)
        optimizer = found["optimizer"]
        return {
            **found,
            "optimizer": {**optimizer, "params": {**optimizer["params"], "weight_decay": decay}},
        }

    return config


def slow_adam(method: str, ratio: float) -> Callable[[float], dict]:
    """A method ``<method>_adam_<number>``."""

    def config(rate: float) -> dict:
        found = METHODS[method](rate)
        params = {**found["optimizer"]["params"], "adam_lr": ratio * rate}
        return {**found, "optimizer": {**found["optimizer"], "params": params}}

    return config


def ramped(method: str) -> Callable[[float], dict]:
    """A method ``<method>_ramp``."""
    return lambda rate: {**METHODS[method](rate), RAMP: list(RAMP_AT)}


def kfac_adamw_varied(**blocks: dict) -> Callable[[float], dict]:
    """K-FAC's gradient into AdamW, with one thing changed."""
    return lambda rate: {**adamw(rate), "kfac": {**KFAC_FOR_ADAMW, **blocks}}


METHODS: dict[str, Callable[[float], dict]] = {
    "adamw": adamw,
    "muon": muon,
    "kfac_sgd": kfac_sgd,
    "kfac_adamw": kfac_adamw,
    "kfacadamw": kfacadamw,
    "muon_filters": muon_filters,
    "soap": soap,
    "shampoo": shampoo,
    "sgd": sgd,
    "kfac_nesterov": kfac_nesterov,
    "kfac_relative": kfac_relative,
    **{f"kfacadamw_{name}": varied(name) for name in VARIATIONS},
    **{
        f"kfac_adamw_{name}": kfac_adamw_varied(**blocks)
        for name, blocks in KFAC_ADAMW_VARIATIONS.items()
    },
    **{f"{name}_slow_table": table_at(name, 0.25) for name in ("kfacadamw", "kfacadamw_unrotated")},
    "adamw_table8": table_at("adamw", 8.0),
    **{f"{name}_decay_{decay:g}": decayed(name, decay) for name in DECAYED for decay in DECAYS},
    **{f"{name}_ramp": ramped(name) for name in RAMPED},
    **{f"{name}_adam_{ratio}": slow_adam(name, ratio) for name in TRAINED for ratio in ADAM_RATIOS},
}

DEFAULT_METHODS = ["adamw", "muon", "kfac_sgd", "kfac_adamw", "kfacadamw"]
"""For texts; the others show what a part of KFACAdamW is worth."""
IMAGE_METHODS = ["sgd", "adamw", "muon_filters", "kfac_nesterov", "kfac_relative", "kfacadamw"]

REWARD_METHODS = [
    "adamw",
    "muon",
    "soap",
    "kfac_sgd",
    "kfac_adamw",
    "kfacadamw",
    "kfacadamw_unrotated",
]
"""Those with adam_lr at lr were worse in brackets."""
AUTOENCODER_METHODS = ["adamw", "muon", "kfac_sgd", "kfac_adamw", "kfacadamw"]

RATES: dict[str, list[float]] = {
    "adamw": [2.5e-4, 5e-4, 1e-3, 2e-3],
    "muon": [0.01, 0.02, 0.04, 0.08],
    "kfac_sgd": [0.1, 0.2, 0.4, 0.8],
    "kfac_adamw": [5e-4, 1e-3, 2e-3, 4e-3],
    "kfacadamw": [5e-4, 1e-3, 2e-3, 4e-3],
    "muon_filters": [0.02, 0.04, 0.08, 0.16],
    "soap": [2e-3, 4e-3, 8e-3, 1.6e-2],
    "shampoo": [2e-3, 4e-3, 8e-3, 1.6e-2],
    "sgd": [0.1, 0.2, 0.4, 0.8],
    "kfac_nesterov": [0.25, 0.5, 1.0, 2.0],
    "kfac_relative": [0.25, 0.5, 1.0, 2.0],
    **{f"kfacadamw_{name}": [5e-4, 1e-3, 2e-3, 4e-3] for name in VARIATIONS},
    **{
        f"{name}_slow_table": [5e-4, 1e-3, 2e-3, 4e-3]
        for name in ("kfacadamw", "kfacadamw_unrotated")
    },
    "adamw_table8": [5e-4, 1e-3, 2e-3, 4e-3],
    **{f"kfac_adamw_{name}": [1e-3, 2e-3, 4e-3, 8e-3] for name in KFAC_ADAMW_VARIATIONS},
}
"""Where a sweep starts; it extends itself while the best is at an edge."""
RATES |= {f"{name}_decay_{decay:g}": RATES[name] for name in DECAYED for decay in DECAYS}
RATES |= {f"{name}_ramp": RATES[name] for name in RAMPED}
RATES |= {f"{name}_adam_{ratio}": RATES[name] for name in TRAINED for ratio in ADAM_RATIOS}
IMAGE_RATES = {
    **RATES,
    "adamw": [5e-3, 1e-2, 2e-2, 4e-2],
    "kfacadamw": [1.25e-3, 2.5e-3, 5e-3, 1e-2],
}
AUTOENCODER_RATES = {
    **RATES,
    "adamw": [1e-3, 2e-3, 4e-3, 8e-3],
    "sgd": [0.01, 0.02, 0.04, 0.08],
    "kfacadamw": [1.25e-3, 2.5e-3, 5e-3, 1e-2],
}
REWARD_RATES = {
    **RATES,
    "adamw": [3e-4, 5e-4, 1e-3, 2e-3, 3e-3],
    "muon": [1e-3, 2e-3, 3e-3, 5e-3, 1e-2],
    "soap": [3e-4, 1e-3, 3e-3],
    "kfac_sgd": [0.003, 0.01, 0.03],
    "kfac_adamw": [3e-4, 1e-3, 3e-3],
    **{name: [1e-4, 2e-4, 3e-4, 5e-4, 1e-3] for name in TRAINED},
    **{f"{name}_adam_{ratio}": [3e-4, 1e-3, 3e-3] for name in TRAINED for ratio in ADAM_RATIOS},
}


def deepspeed_config(method: str, rate: float, *, rows: int, steps: int, stage: int) -> dict:
    """The whole config of a run: fp32, one micro-batch a step."""
    schedule = {
        "total_num_steps": steps,
        "warmup_num_steps": max(2, round(WARMUP_PART * steps)),
        # DeepSpeed's default is a logarithm, nearly at the peak after a few steps
        "warmup_type": "linear",
        "warmup_min_ratio": LAST_RATIO,
        "cos_min_ratio": LAST_RATIO,
    }
    own = METHODS[method](rate)
    if stage and own.get("optimizer", {}).get("type") == "Muon":
        # DeepSpeed would clip orthogonalized updates, see docs/howto/switch.md
        own["gradient_clipping"] = 0.0
    return {
        "train_micro_batch_size_per_gpu": rows,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": stage},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        **own,
    }
