"""What K-FAC will cost a run, before it: computed from the very plan the run would use, without
building the model."""
