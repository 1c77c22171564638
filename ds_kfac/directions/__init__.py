"""The update rules, a line of DIRECTIONS each."""
