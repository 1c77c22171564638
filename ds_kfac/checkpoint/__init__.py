"""Save, check and load K-FAC's part of a checkpoint."""
