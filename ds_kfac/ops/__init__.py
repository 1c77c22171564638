"""The ops that other folders call, and the backends that implement them."""
