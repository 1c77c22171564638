"""Find a model's layers, put hooks on them, and select the rows of a batch that enter the
factors."""
