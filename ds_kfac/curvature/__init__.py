"""One factor: the structure of its side, its running average, its decomposition, damping and
precision."""
