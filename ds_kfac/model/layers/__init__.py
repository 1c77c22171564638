"""Layer types: how a layer's parameters form one matrix, and how its tensors form rows."""
