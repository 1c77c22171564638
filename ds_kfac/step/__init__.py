"""One step: reduce, update, decompose, gather, precondition, scatter."""
