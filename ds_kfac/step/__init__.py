"""One step: update, reduce, decompose, broadcast, precondition, commit."""
