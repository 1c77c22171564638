"""A captured step without DeepSpeed, compared with tests/truth.py."""

import copy
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec, key_of
from ds_kfac.model.rows import PASSES, ROWS, TERMS, RowSums
from ds_kfac.model.scan import LayerChoice, scan
from ds_kfac.model.shared import SharedInputs
from tests.close import close
from tests.ops.specification import symmetric_pack
from tests.truth import Truth

LINEAR = LayerChoice(types=("Linear", "Conv1D"))


class Factors(NamedTuple):
    """Factors of one step: packed, None where the layer has no row; numbers of rows of A, and the
    sum of R_p."""

    A: Tensor | None
    G: Tensor | None
    rows: float
    terms: float


class Recorder:
    """A model with capture, as an engine drives it on one rank.

    Args:
        layers: those to capture; None: all that a scan with ``choice`` finds.
    """

    def __init__(
        self,
        model: nn.Module,
        choice: LayerChoice = LINEAR,
        *,
        layers: tuple[LayerSpec, ...] | None = None,
        sharing: str = "expand",
        positions: bool = True,
        sampled: bool = False,
        inputs: SharedInputs | None = None,
        scale: float = 1.0,
    ) -> None:
        self.model = model
        self.layers = scan(model, choice).layers if layers is None else layers
        rows = RowSums(sharing, positions)
        self.capture = Capture(
            model,
            self.layers,
            lambda announced: scale,
            rows=rows,
            inputs=inputs,
            sampled=sampled,
            counts_terms=True,
        )
        self.begin()

    def begin(self, step: int = 0, *, stride: int = 1, **options) -> None:
        """Begin a captured step of all factors, of one row in ``stride``."""
        keys = {self.capture.inputs.key(layer) for layer in self.layers}
        keys |= {key_of(layer.name, "G") for layer in self.layers}
        self.capture.begin_step(dict.fromkeys(keys, stride), step, **options)

    def backward(self, loss: Tensor, **options) -> None:
        """As ``engine.backward``."""
        with self.capture.own_backward():
            loss.backward(**options)

    def factors(self) -> dict[str, Factors]:
        """End the step, and begin another one. Returns the factors of the layers that had a row."""
        capture = self.capture
        capture.end_step()
        found = {}
        for layer in self.layers:
            A, G = (capture.sums.get(key) for key in (capture.inputs.key(layer), layer.keys[1]))
            if A is None or not A.counts[ROWS] > 0:
                continue
            has_G = G is not None and G.counts[ROWS] > 0
            scale_A = (
                A.counts[PASSES]
                if key_of(layer.name, "A") in capture.of_gradients
                else 1 / A.counts[ROWS]
            )
            found[layer.name] = Factors(
                A.sum_P * scale_A,
                G.sum_P * G.counts[PASSES] if has_G else None,
                float(A.counts[ROWS]),
                float(A.counts[TERMS]),
            )
        self.begin(capture.step)
        return found

    def rows(self) -> dict[str, float]:
        """Layer -> its number of rows in the step, which ends."""
        return {name: found.rows for name, found in self.factors().items()}


def compared(
    model: nn.Module,
    program: Callable[[nn.Module, Callable[..., None]], object],
    *,
    true_program: Callable[[nn.Module, Callable[..., None]], object] | None = None,
    sharing: str = "expand",
    plain: bool = False,
    **options,
) -> dict[str, Factors]:
    """Run a program with capture and with the truth of tests/truth.py, assert that A, G and counts
    are the same, and return them.

    Args:
        program: (model, backward) -> the forwards and backward passes of a step.
        true_program: what the truth runs in place of it.
        plain: whether the captured program calls ``loss.backward()``, which nobody announces.
        options: of :class:`Recorder`.
    """
    truth = Truth(copy.deepcopy(model), sharing=sharing)
    recorder = Recorder(model, sharing=sharing, **options)

    def unannounced(loss: Tensor, **how) -> None:
        loss.backward(**how)

    program(model, unannounced if plain else recorder.backward)
    assert not recorder.capture.failed
    found = recorder.factors()
    with truth:
        (true_program or program)(truth.model, unannounced)
    same(found, true_factors(truth, recorder.layers))
    return found


def true_factors(truth: Truth, layers: tuple[LayerSpec, ...]) -> dict[str, Factors]:
    """Return what the truth has of these layers."""
    terms, names = float(truth.sums()["terms"]), {layer.name for layer in layers}
    return {
        name: Factors(symmetric_pack(A), symmetric_pack(G), float(rows), terms)
        for name, (A, G, rows) in truth.factors().items()
        if name in names
    }


def same(found: Mapping[str, Factors], expected: Mapping[str, Factors], sums: float = 1000) -> None:
    """Factors of two computations are equal up to rounding, and counts are equal."""
    assert expected and found.keys() == expected.keys()
    for name, true in expected.items():
        assert (found[name].rows, found[name].terms) == (true.rows, true.terms), name
        close(found[name].A, true.A, sums=sums, what=f"A of {name}")
        close(found[name].G, true.G, sums=sums, what=f"G of {name}")


class Watched:
    """Which inputs of modules live: their memory, whether Python knows of them or not."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[StorageWeakRef] = []
        self.most = 0
        for module in model.modules():
            module.register_forward_pre_hook(self._see)

    def _see(self, module: nn.Module, inputs: tuple) -> None:
        self.most = max(self.most, self.living())
        self.seen.append(StorageWeakRef(inputs[0].untyped_storage()))

    def living(self) -> int:
        return len({one.cdata for one in self.seen if not one.expired()})
