import benchmarks.kernels  # noqa: F401 - tests of ops run without DeepSpeed
