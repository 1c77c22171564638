"""One step of K-FAC: reduce, update, decompose, gather, precondition, scatter."""
