"""Learning-rate schedulers that programs give to DeepSpeed."""
