"""What K-FAC tells its user: whether an environment and a config will work, what was attached, what
state each layer is in, and why."""
