"""Triton kernels, one a file. Importing any but ``availability`` needs triton."""
