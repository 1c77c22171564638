"""What the files of a save hold: one pydantic model for each kind of file.

    header.json            Header
    <layer>.A.factor.pt    FactorFile
    <layer>.layer.pt       LayerFile
    states.json            Fingerprints

Models are strict: an unknown key is an error, and no value is converted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)
from torch import Tensor

from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.methods import METHODS

FORMAT = 2
"""Version number of the file format of a save. Increase it if older versions of ds_kfac could not
read the new files."""
SAVE_ID = r"^[0-9a-f]{12}$"
"""Regex of a save's id, which is also the name of its folder."""
SHOWN = 3
"""An error lists at most this many problems of a file."""
LONGEST = 60
"""An error shows at most this many characters of a value."""

Record = TypeVar("Record", bound=BaseModel)
Name = InstanceOf[str]
"""Name of a layer, factor, domain or file. Unlike ``str`` it may hold lone surrogates, as module
names may."""


def _method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"must be one of {', '.join(METHODS)}")
    return name


class SavedSide(NamedTuple):
    """A :class:`Side` in the form that JSON stores, [dim, block]."""

    dim: NonNegativeInt
    block: NonNegativeInt

    @property
    def side(self) -> Side:
        return Side(self.dim, self.block)


class Captures(NamedTuple):
    """Number of factor captures that took place, and number that the adaptive rule skipped."""

    captured: NonNegativeInt
    skipped: NonNegativeInt


class SavedClock(NamedTuple):
    """The adaptive rule's state for one factor: its current and previous interval, and the steps of
    its last capture and last refresh. A step is -1 if there was no capture or no refresh yet."""

    interval: int
    previous: int
    captured: int
    refreshed: int


class SavedProofClock(NamedTuple):
    """A ``ProofClock`` in the form that JSON stores."""

    proofs: NonNegativeInt
    wait: NonNegativeInt
    step: int
    is_due: bool


class _Record(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True
    )


class FactorKinds(_Record):
    """Kinds of rows from which A and G are averaged, for example ``A="expand"`` and
    ``G="empirical, expand"``. Averages of different kinds must not be mixed."""

    A: str
    G: str


class LayerRecord(_Record):
    """Sides of a layer's matrix, and the layer's number of groups."""

    A: SavedSide
    G: SavedSide
    groups: NonNegativeInt


class TimetableRecord(_Record):
    """State of the ``Timetable`` of each domain.

    Attributes:
        domains: name of a domain -> counts of its captures.
        factors: factor key -> its clock; empty without the adaptive rule.
    """

    domains: dict[Name, Captures]
    factors: dict[Name, SavedClock]


class ProofsRecord(_Record):
    """State of the ``Proving`` of each domain.

    Attributes:
        domains: name of a domain -> when its proofs take place.
        unfit: layer name -> why the layer has no curvature.
        again: keys of the factors for which the next step collects statistics even if the timetable
            has no capture.
    """

    domains: dict[Name, SavedProofClock]
    unfit: dict[Name, str]
    again: list[Name]


class FileEntry(_Record):
    """The header's entry for a file.

    Attributes:
        holds: name of the layer, or key of the factor ("<layer>/A"), that the file holds.
        bytes: size of the file in bytes.
        crc32: CRC-32 of the file's bytes.
        parts: dict from the path of a value in the payload, such as "A.eigenvectors", to a
            description of the value. A tensor's description is its dtype and shape. Any other
            value's description is the name of its type.
    """

    holds: Name
    bytes: NonNegativeInt
    crc32: NonNegativeInt
    parts: dict[Name, Name]


class Header(_Record):
    """``header.json``: what a save holds. Layers are named as in the whole model. A domain is the
    set of layers whose gradients are averaged over the same ranks, for example the dense layers or
    some experts.

    Attributes:
        format: :data:`FORMAT`.
        save_id: id of the save, which is also the name of its folder. DeepSpeed's client_state has
            it, too.
        steps: number of optimizer steps that have been applied.
        method: the ``preconditioner.method`` that made the layers' decompositions.
        moments: ``NAME`` of the moments class whose tensors are in the layers' files; None if the
            files have no moments.
        kinds: kinds of rows that the factors average. A run that averages rows of another kind
            starts with empty factors.
        layers: layer name -> its sides and groups.
        factors: factor key -> its side.
        peak_lr: index of a parameter group -> its largest learning rate so far.
        shared: groups of layers that share one A; None if they were not known yet.
        rows: layer name -> mean number of rows that a rank has in a step. Empty if these numbers
            were not known yet, or if nothing depends on them.
        ranks: name of a domain -> number of its ranks when ``rows`` was observed.
        timetable: the adaptive rule's state.
        proofs: which layers fail the proof of their rows, and when the next proof takes place.
        ready: keys of the factors that have been decomposed.
        files: name of a file of the save -> what it holds, and its checksum.
    """

    format: NonNegativeInt
    save_id: Annotated[str, Field(pattern=SAVE_ID)]
    steps: NonNegativeInt
    method: Annotated[str, AfterValidator(_method)]
    moments: str | None
    kinds: FactorKinds
    layers: dict[Name, LayerRecord]
    factors: dict[Name, SavedSide]
    peak_lr: dict[str, float]
    shared: list[list[Name]] | None
    rows: dict[Name, float]
    ranks: dict[Name, NonNegativeInt]
    timetable: TimetableRecord
    proofs: ProofsRecord
    ready: list[Name]
    files: dict[Name, FileEntry]


class HistoryRecord(_Record):
    """A factor's values after its last two updates, each fp32 [P]. Adaptive intervals need them."""

    last: Tensor
    before: Tensor


class FactorFile(_Record):
    """The file of a factor.

    Attributes:
        packed: fp32 [P], the running average, packed as in :class:`KroneckerFactor`.
        updates: fp32 scalar, number of averaged batches.
        history: the factor's last two values; None without adaptive intervals.
    """

    packed: Tensor
    updates: Tensor
    history: HistoryRecord | None


class LayerFile(_Record):
    """The file of a layer.

    Attributes:
        terms: fp32 scalar, number of loss terms of the last captured batch.
        A, G: name of a part of the side's decomposition -> flat tensor; None before the first
            refresh.
        moments: dict from attribute name in the moments class, such as "second_OI", to fp32 tensor;
            None if the update rule keeps no moments.
    """

    terms: Tensor
    A: dict[str, Tensor] | None
    G: dict[str, Tensor] | None
    moments: dict[str, Tensor] | None


class Fingerprint(NamedTuple):
    """Size and CRC-32 of a file that DeepSpeed wrote. A file with the same name from another save
    usually has a different size or CRC-32. The CRC-32 is computed over the checksums in torch's
    archive."""

    bytes: int
    crc32: int


Fingerprints = TypeAdapter(dict[str, Fingerprint])
"""``states.json``: name of a file that DeepSpeed wrote into the tag -> its fingerprint. Empty if
DeepSpeed was still writing."""


def checked(record: type[Record], value: Any, path: Path) -> Record:
    """Return a file's content as a record.

    Raises:
        ValueError: the content is not such a record. The message begins with the file's path.
    """
    try:
        return record.model_validate(value)
    except ValidationError as error:
        problems = error.errors()
        texts = [_described(problem) for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            texts.append(f"and {len(problems) - SHOWN} more")
        raise ValueError(
            f"{path}: {'; '.join(texts)}. The file is damaged, or this version of ds_kfac did not "
            "write it: load another save"
        ) from error


def _described(problem: Mapping[str, Any]) -> str:
    """Say what is wrong with one value, and what was found in its place."""
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{place} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{place} is unknown"
    shown = repr(problem["input"])
    if len(shown) > LONGEST:
        shown = f"{shown[:LONGEST]} .."
    return f"{place} is {shown}: {problem['msg']}"
