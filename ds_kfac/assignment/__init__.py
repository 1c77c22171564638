"""The cost of each task of a step, and the assignment of tasks to ranks: which rank decomposes each
factor, and which ranks precondition each layer."""
