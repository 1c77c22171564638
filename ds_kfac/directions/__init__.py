"""The update rules. ``table.py`` lists them in DIRECTIONS."""
