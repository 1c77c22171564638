"""Processing of gradients in groups of layers of one shape: their rotation, moments and
Newton-Schulz iteration, and the state that is kept for them."""
