"""Estimates of what K-FAC will cost a run, before the run. They are computed from the same plan
that the run would use, without building the model."""
