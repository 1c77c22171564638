"""What K-FAC tells its user: whether an environment and a config will work, what was attached, and
why a layer is in the state that it is in."""
