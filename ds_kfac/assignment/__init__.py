"""Who decomposes which factor and preconditions which layer, from a cost model."""
