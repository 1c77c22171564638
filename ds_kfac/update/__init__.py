"""How gradients are processed, in groups of layers of one shape: rotation, moments, Newton-Schulz
iteration, and the state that is kept between steps."""
