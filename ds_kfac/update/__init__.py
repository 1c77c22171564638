"""One layer's gradient: rotation, division, moments, kl-clip, Newton-Schulz, the layer's state; quadratic models."""
