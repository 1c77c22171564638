"""Where DeepSpeed keeps gradients in each engine mode, and how K-FAC moves gradients to the layers'
gradient workers (the ranks that precondition the layers) and moves the results back."""
