"""The ``"kfac"`` block of a DeepSpeed config: models, defaults, and errors that say all that is wrong at once."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

KEY = "kfac"


class _Model(DeepSpeedConfigModel):
    """DeepSpeed's base, without its habit of coercing and of dropping "auto"."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, frozen=True)

    def __init__(self, **data: Any) -> None:
        BaseModel.__init__(self, **data)


class FactorConfig(_Model):
    """The factors A and G."""

    update_interval: int = Field(10, ge=1)
    """Steps between two batches folded into the factors."""
    decay: float = Field(0.95, ge=0, lt=1)
    """Weight of the past in the running average; bias-corrected, so early averages are plain means."""
    max_dim: int | None = Field(None, ge=1)
    """A layer with a longer side is left to the optimizer alone, and listed: its dense factor would be too large (a
    vocabulary of 50,000 takes 5 GB packed). null chooses 16384."""


class EigenbasisConfig(_Model):
    """When and how eigenbases are refreshed."""

    refresh_interval: int | None = Field(None, ge=1)
    """Steps between two decompositions, a multiple of factor.update_interval; null chooses ten times it."""
    method: Literal["eigh"] = "eigh"
    """Exact symmetric eigendecomposition."""


class DampingConfig(_Model):
    """What is added to the Fisher's eigenvalues."""

    value: float | None = Field(None, gt=0)
    """null chooses 0.001 for tikhonov, 1 for relative."""
    kind: Literal["tikhonov", "relative"] = "relative"
    """tikhonov: the value itself. relative: times the layer's mean eigenvalue, mean(A) mean(G)."""

    @property
    def chosen(self) -> float:
        if self.value is not None:
            return self.value
        return {"tikhonov": 1e-3, "relative": 1.0}[self.kind]


class PreconditionerConfig(_Model):
    """The step in the eigenbasis."""

    kl_clip: float | None = Field(None, ge=0)
    """Bound kappa on lr^2 <V, gradient> summed over layers; 0 switches it off, null chooses 0.001."""
    kl_clip_lr: Literal["current", "peak"] | None = None
    """The lr in that bound. With "current", nu * lr does not depend on lr, which undoes a schedule; "peak" takes the
    largest lr seen, so the step shrinks with it. null: "peak" if DeepSpeed runs an lr scheduler, else "current"."""

    @property
    def chosen_kl_clip(self) -> float:
        return 1e-3 if self.kl_clip is None else self.kl_clip


class LayersConfig(_Model):
    """Which layers; Python regexes searched in module names."""

    include: list[str] = []
    """If any are given, only modules matching one of them."""
    exclude: list[str] = []
    """Modules matching one of them are left to the optimizer alone."""


class AssignmentConfig(_Model):
    """Who owns a layer."""

    load_tolerance: float = Field(0.1, ge=0)
    """A layer stays where most of its gradient is unless that rank's load passes the mean by this part."""
    kfac_first: bool = False
    """Lay parameter groups out as [preconditioned | rest], so that fewer layers straddle ranks under ZeRO-1/2.
    Changes DeepSpeed's checkpoint layout: use it from the first step of a run, or not at all."""


class CheckpointConfig(_Model):
    """What is saved beside DeepSpeed's files."""

    eigenbasis: bool = True
    """Save eigenbases: resuming continues exactly. false saves two thirds of the space and decomposes on loading."""


class MetricsConfig(_Model):
    """What is measured."""

    timings: bool = False
    """Time every stage of the K-FAC step (synchronises the device); see ``engine.kfac.metrics.seconds``."""


class KFACConfig(_Model):
    """The ``"kfac"`` block. ``null`` or leaving a key out means "choose for me"."""

    enabled: bool = True
    """false: the engine is left as DeepSpeed made it."""
    factor: FactorConfig = FactorConfig()
    eigenbasis: EigenbasisConfig = EigenbasisConfig()
    damping: DampingConfig = DampingConfig()
    preconditioner: PreconditionerConfig = PreconditionerConfig()
    layers: LayersConfig = LayersConfig()
    assignment: AssignmentConfig = AssignmentConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def max_dim(self) -> int:
        return self.factor.max_dim or 16384

    @property
    def refresh_interval(self) -> int:
        return self.eigenbasis.refresh_interval or 10 * self.factor.update_interval


def parse(block: Any) -> KFACConfig:
    """Check a ``"kfac"`` block.

    Raises:
        ValueError: one message with every error: unknown keys with the nearest valid one, wrong types and ranges,
            and keys that contradict each other.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f'"kfac" must be an object such as {{"enabled": true}}, got {block!r}')
    errors, config = [], None
    try:
        config = KFACConfig(**_without_nulls(block))
    except ValidationError as error:
        errors = [_explain(detail) for detail in error.errors()]
    errors += _contradictions(block)
    if errors or config is None:
        raise ValueError('invalid DeepSpeed config, block "kfac":\n  ' + "\n  ".join(errors))
    return config


def _without_nulls(block: Mapping[str, Any]) -> dict[str, Any]:
    """null is the same as leaving a known key out; an unknown key must still be seen."""

    def prune(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
        pruned = {}
        for key, value in values.items():
            field = model.model_fields.get(key)
            if value is None and field is not None:
                continue
            sub_model = _block_model(field)
            pruned[key] = prune(value, sub_model) if sub_model and isinstance(value, Mapping) else value
        return pruned

    return prune(block, KFACConfig)


def _block_model(field: FieldInfo | None) -> type[BaseModel] | None:
    """The model of a field that is a block of its own."""
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _explain(detail: Any) -> str:
    path, got = ".".join(map(str, detail["loc"])), detail["input"]
    if detail["type"] == "extra_forbidden":
        return f"kfac.{path}: unknown key; {_nearest(path)}"
    if got == "auto":
        return f'kfac.{path}: "auto" is not used in this block, leave the key out or write null'
    if detail["type"] == "model_type":
        return f"kfac.{path}: got {got!r}; must be an object"
    return f"kfac.{path}: got {got!r}; {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _nearest(path: str) -> str:
    """The valid key closest to an unknown one, in the same block or any other."""
    *parents, key = path.split(".")
    valid = dict(_paths(KFACConfig))
    block = ".".join(parents)
    siblings = [name for name, parent in valid.items() if parent == block]
    close = difflib.get_close_matches(path, siblings, n=1, cutoff=0.6)
    close = close or [name for name in valid if name.split(".")[-1] == key]
    close = close or difflib.get_close_matches(path, list(valid), n=1, cutoff=0.5)
    return (
        f"did you mean kfac.{close[0]}?" if close else "valid keys: " + ", ".join(f"kfac.{name}" for name in siblings)
    )


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, path of its block) of every key."""
    for name, field in model.model_fields.items():
        yield prefix + name, prefix.rstrip(".")
        if sub_model := _block_model(field):
            yield from _paths(sub_model, f"{prefix}{name}.")


def _contradictions(block: Mapping[str, Any]) -> list[str]:
    """Constraints between keys; on the raw block, so that they are reported together with other errors."""

    def given(section: str, key: str) -> Any:
        values = block.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    update, refresh = given("factor", "update_interval"), given("eigenbasis", "refresh_interval")
    update = FactorConfig().update_interval if update is None else update
    if type(update) is int and type(refresh) is int and update >= 1 and refresh >= 1 and refresh % update:
        return [
            f"kfac.eigenbasis.refresh_interval ({refresh}) must be a multiple of kfac.factor.update_interval "
            f"({update}); otherwise a refresh would see stale factors"
        ]
    return []


def find_block(ds_config: Mapping[str, Any]) -> Any | None:
    """The ``"kfac"`` block of a whole DeepSpeed config; None if there is none.

    Raises:
        ValueError: no such key, but one that looks like a misspelt one: DeepSpeed would ignore it silently.
    """
    if KEY in ds_config:
        return ds_config[KEY]
    for key in ds_config:
        if "".join(c for c in str(key).lower() if c.isalnum()) in ("kfac", "dskfac", "kfacs", "kfak"):
            raise ValueError(f'DeepSpeed config: key "{key}" is not read by anyone; did you mean "kfac"?')
    return None
