"""Write factors to files, from a training run or from any model and data, in formats that other
tools read."""
