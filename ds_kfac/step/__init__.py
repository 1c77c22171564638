"""One step of K-FAC: sum the batch's statistics over ranks, update and decompose factors, gather
and precondition gradients, and send the results back."""
