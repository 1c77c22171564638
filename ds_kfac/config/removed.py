"""Keys, and values of keys, that a config of version 0.1 may name, and what to do now."""

REMOVED = {
    "eigenbasis.method": "leave it out, decompositions are always eigh",
    "eigenbasis.keep_below": "leave it out and, to refresh less, set adaptive.enabled",
    "eigenbasis.values_below": "leave it out and, to refresh less, set adaptive.enabled",
    "eigenbasis.qr_below": "leave it out and, to refresh less, set adaptive.enabled",
    "eigenbasis.carry_moments": "leave it out, second moments are kept as they are at a refresh",
    "layers.max_outputs": "leave it out, layers are not cut by rows",
    "communication.error_feedback": "leave it out, batch sums are rounded without it",
    "communication.overlap": "leave it out, batch sums are always sent during backward where that is possible",
    "assignment.split_factors": "leave it out, A and G of a layer part where it has several gradient workers",
    "assignment.load_tolerance": "leave it out, a rank may have 10 % more than the mean load",
    "assignment.kfac_first": "leave it out, parameter groups stay as they are but with KFACAdamW",
    "eigenbasis.exact_every": "leave it out, every refresh is exact",
    "preconditioner.stack_layers": "leave it out, small layers of equal shape go together on GPUs",
    "preconditioner.kl_clip_lr": "leave it out, it is the peak with DeepSpeed's lr scheduler, else the current one",
    "adam.rms": "write adam.size with adam.scale rms; rates for adam.scale spectral, the default, are AdamW's",
    "factor.large_input": "write factor.large, which holds for both sides",
    "factor.large_output": "write factor.large, which holds for both sides",
    "adaptive.max_interval": "leave it out, intervals grow while a factor stays similar",
    "burn_in.refresh_interval": "leave it out, it is twice burn_in.update_interval",
    "padding.mask": "name it attention_mask, or set engine.kfac.read_batch (docs/tuning.md)",
    "padding.labels": "name them labels, or set engine.kfac.read_batch (docs/tuning.md)",
    "padding.ignore_index": "use -100, or set engine.kfac.read_batch (docs/tuning.md)",
    "padding.shifted": "leave it out for a ..ForCausalLM, or set engine.kfac.read_batch (docs/tuning.md)",
}
"""Path inside ``"kfac"`` -> the rest of the sentence after "was removed: "."""
REMOVED_VALUES = {
    ("ops.backend", "cpp"): "leave ops.backend out, plain torch runs on the CPU (C++ made a step 1.03 times as fast)",
}
"""The same of a value: (path, value)."""
