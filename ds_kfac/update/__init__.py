"""How gradients are processed, in groups of layers of the same shape: rotation, moments,
Newton-Schulz iteration, and the state that is kept between steps."""
