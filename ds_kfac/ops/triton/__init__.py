"""Triton kernels. Importing any file but ``backend`` needs triton."""
