"""The op vocabulary: specification, backends and the functions that other folders call."""
