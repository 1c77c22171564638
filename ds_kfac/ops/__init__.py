"""The op vocabulary: backends and the functions that other folders call."""
