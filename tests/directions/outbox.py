"""Where a direction's results go, in tests of it alone: layer name -> matrix."""


class Results(dict):
    def add(self, layer, matrix_OI) -> None:
        assert layer.name not in self
        self[layer.name] = matrix_OI
