"""The "kfac" block: its models, errors and manual."""
