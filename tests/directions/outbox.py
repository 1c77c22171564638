"""Where a direction's results go, in tests of it alone: layer name -> matrix."""


class Results(dict):
    def claim(self, layers) -> None:
        return None

    def add(self, layers, matrices) -> None:
        assert not any(layer.name in self for layer in layers)
        self.update(zip([layer.name for layer in layers], matrices, strict=True))
