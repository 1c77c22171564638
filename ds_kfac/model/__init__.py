"""Which layers a model has, the hooks on these layers, and which rows of a batch enter the
factors."""
