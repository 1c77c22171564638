"""Layers of a model, hooks, and the rows of a batch that are counted."""
