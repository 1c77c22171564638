"""A cost model, and the assignment of tasks to ranks that follows from it: which rank decomposes
each factor, and which ranks precondition each layer."""
