"""When factors are updated and decomposed."""
