"""Estimate before a run what K-FAC will cost. The estimate uses the plan that the run would use,
and does not allocate memory for the model."""
