"""The op vocabulary: specification, backends and the functions other floors call."""
