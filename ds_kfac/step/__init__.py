"""One step of K-FAC: reduce batch sums, update and decompose factors, gather and precondition
gradients, scatter results."""
