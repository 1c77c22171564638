"""Factors as files: of a training run, or of any model without one, in formats that other tools
read."""
