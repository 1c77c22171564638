"""The mathematics of a single factor: the structure of its side, its running average, its
decomposition, damping and precision."""
