"""Where DeepSpeed keeps gradients in each engine mode, and how K-FAC moves them to the layers'
workers and the results back."""
