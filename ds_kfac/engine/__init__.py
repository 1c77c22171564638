"""Attaching to a DeepSpeed engine."""
