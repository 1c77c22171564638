"""Where DeepSpeed keeps gradients in each engine mode, and how they get to a layer's owner and
back."""
