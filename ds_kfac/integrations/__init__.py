"""Doors for programs that build the engine themselves. Nothing here is imported by the rest."""
