"""The ``"kfac"`` block of a DeepSpeed config: models, defaults, and errors that say all that is wrong at once."""

from collections.abc import Mapping
from typing import Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_kfac.config_errors import explain, without_nulls
from ds_kfac.config_values import Decay, Interval, NotNegative, Positive
from ds_kfac.schedule import BurnIn, Schedule, Value

KEY = "kfac"


class _Model(DeepSpeedConfigModel):
    """DeepSpeed's base, without its habit of coercing and of dropping "auto"."""

    # A default is a Value already, which the validators of its field do not take.
    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, frozen=True, validate_default=False)

    def __init__(self, **data: Any) -> None:
        BaseModel.__init__(self, **data)


class FactorConfig(_Model):
    """The factors A and G."""

    update_interval: Interval = Value.constant(10)
    """Steps between two batches folded into the factors."""
    decay: Decay = Value.constant(0.95)
    """Weight of the past in the running average; bias-corrected, so early averages are plain means."""
    max_dim: int | None = Field(None, ge=1)
    """A layer with a longer side is left to the optimizer alone, and listed: its dense factor would be too large (a
    vocabulary of 50,000 takes 5 GB packed). null chooses 16384."""

    def decay_at(self, step: int) -> float:
        return self.decay.at(step)


class EigenbasisConfig(_Model):
    """When and how eigenbases are refreshed."""

    refresh_interval: Interval | None = None
    """Steps between two decompositions, a multiple of factor.update_interval; null chooses ten times it
    (before rounding). If either is a schedule, a refresh waits for the next factor update."""
    method: Literal["eigh"] = "eigh"
    """Exact symmetric eigendecomposition."""


class DampingConfig(_Model):
    """What is added to the Fisher's eigenvalues."""

    value: Positive | None = None
    """null chooses 0.001 for tikhonov, 1 for relative."""
    kind: Literal["tikhonov", "relative"] = "relative"
    """tikhonov: the value itself. relative: times the layer's mean eigenvalue, mean(A) mean(G)."""

    @property
    def chosen(self) -> Value:
        if self.value is not None:
            return self.value
        return Value.constant({"tikhonov": 1e-3, "relative": 1.0}[self.kind])

    def at(self, step: int) -> float:
        return self.chosen.at(step)


class PreconditionerConfig(_Model):
    """The step in the eigenbasis."""

    kl_clip: NotNegative | None = None
    """Bound kappa on lr^2 <V, gradient> summed over layers; 0 switches it off, null chooses 0.001."""
    kl_clip_lr: Literal["current", "peak"] | None = None
    """The lr in that bound. With "current", nu * lr does not depend on lr, which undoes a schedule; "peak" takes the
    largest lr seen, so the step shrinks with it. null: "peak" if DeepSpeed runs an lr scheduler, else "current"."""

    @property
    def chosen_kl_clip(self) -> Value:
        return Value.constant(1e-3) if self.kl_clip is None else self.kl_clip

    def kl_clip_at(self, step: int) -> float:
        """0: no clipping at that step."""
        return self.chosen_kl_clip.at(step)


class BurnInConfig(_Model):
    """Other intervals at the start of a run, where curvature changes fastest."""

    steps: int = Field(0, ge=0)
    """How long they hold; the step after it refreshes everything. 0: no burn-in."""
    update_interval: int = Field(1, ge=1)
    """In place of factor.update_interval."""
    refresh_interval: int | None = Field(None, ge=1)
    """In place of eigenbasis.refresh_interval, a multiple of burn_in.update_interval; null chooses ten times it."""

    @property
    def chosen(self) -> BurnIn | None:
        if not self.steps:
            return None
        return BurnIn(self.steps, self.update_interval, self.refresh_interval or 10 * self.update_interval)


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
    """The ``"kfac"`` block. ``null`` or leaving a key out means "choose for me".

    A key of type :class:`Value` takes a number, ``{"schedule": "linear" | "cosine" | "exponential", "start": x,
    "end": y, "steps": n, "delay": d}`` or ``{"schedule": "piecewise", "values": [...], "steps": [...]}``, in applied
    steps since the start of the run.
    """

    enabled: bool = True
    """false: the engine is left as DeepSpeed made it."""
    factor: FactorConfig = FactorConfig()
    eigenbasis: EigenbasisConfig = EigenbasisConfig()
    burn_in: BurnInConfig = BurnInConfig()
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
    def schedule(self) -> Schedule:
        """What is due when."""
        update, refresh = self.factor.update_interval, self.eigenbasis.refresh_interval
        return Schedule(update, update.times(10) if refresh is None else refresh, self.burn_in.chosen)


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
        config = KFACConfig(**without_nulls(block, KFACConfig))
    except ValidationError as error:
        errors = [explain(detail, block, KFACConfig) for detail in error.errors()]
    errors += _contradictions(block)
    if errors or config is None:
        raise ValueError('invalid DeepSpeed config, block "kfac":\n  ' + "\n  ".join(errors))
    return config


def _contradictions(block: Mapping[str, Any]) -> list[str]:
    """Constraints between keys; on the raw block, so that they are reported together with other errors."""

    def given(section: str, key: str) -> Any:
        values = block.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    errors = []
    for update_section, default, refresh_section in (
        ("factor", FactorConfig().update_interval.interval_at(0), "eigenbasis"),
        ("burn_in", BurnInConfig().update_interval, "burn_in"),
    ):
        update, refresh = given(update_section, "update_interval"), given(refresh_section, "refresh_interval")
        update = default if update is None else update
        # Of schedules nothing is asked: their refreshes wait for the next factor update.
        if type(update) is int and type(refresh) is int and update >= 1 and refresh >= 1 and refresh % update:
            errors.append(
                f"kfac.{refresh_section}.refresh_interval ({refresh}) must be a multiple of "
                f"kfac.{update_section}.update_interval ({update}); otherwise a refresh would see stale factors"
            )
    return errors


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
