"""Gradients of layers of one shape: rotation, division, moments, kl-clip, Newton-Schulz, what they keep."""
