"""Where DeepSpeed keeps gradients in each engine mode, and how they travel to a layer's owner and
back."""
