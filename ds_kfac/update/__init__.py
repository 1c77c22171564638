"""Gradients of layers of one shape: rotation, moments, Newton-Schulz, what they keep."""
