"""K-FAC's files: what is saved, checked and loaded."""
