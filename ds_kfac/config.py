"""The ``"kfac"`` block of a DeepSpeed config: models, defaults, and errors that say all that is wrong at once."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from ds_kfac.config_blocks import (
    AdamConfig,
    AdaptiveConfig,
    Block,
    BurnInConfig,
    DampingConfig,
    EigenbasisConfig,
    FactorConfig,
    PreconditionerConfig,
)
from ds_kfac.config_errors import explain, without_nulls
from ds_kfac.config_system import (
    AssignmentConfig,
    CheckpointConfig,
    CommunicationConfig,
    LayersConfig,
    MetricsConfig,
    OffloadConfig,
    OpsConfig,
    PaddingConfig,
)
from ds_kfac.scan import Choice
from ds_kfac.schedule import Schedule

DEFAULT_TYPES = ("Linear", "Conv1D")
"""Layer types that are preconditioned unless ``layers.types`` says otherwise."""

KEY = "kfac"


class KFACConfig(Block):
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
    adaptive: AdaptiveConfig = AdaptiveConfig()
    damping: DampingConfig = DampingConfig()
    preconditioner: PreconditionerConfig = PreconditionerConfig()
    adam: AdamConfig = AdamConfig()
    layers: LayersConfig = LayersConfig()
    padding: PaddingConfig = PaddingConfig()
    assignment: AssignmentConfig = AssignmentConfig()
    communication: CommunicationConfig = CommunicationConfig()
    offload: OffloadConfig = OffloadConfig()
    ops: OpsConfig = OpsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def max_dim(self) -> int:
        return self.factor.max_dim or 16384

    def for_optimizer(self, *, adam: bool) -> "KFACConfig":
        """With what depends on the optimizer chosen; ``adam``: it is KFACAdamW.

        Raises:
            ValueError: its step is in an eigenbasis, and none is kept.
        """
        if adam and self.preconditioner.method == "inverse":
            raise ValueError(
                'kfac.preconditioner.method "inverse" keeps no eigenbasis, in which KFACAdamW steps; use "eigen", or '
                "another optimizer"
            )
        if self.factor.fisher is not None:
            return self
        factor = self.factor.model_copy(update={"fisher": "activations_only" if adam else "empirical"})
        return self.model_copy(update={"factor": factor})

    @property
    def choice(self) -> Choice:
        """Which layers, for :func:`ds_kfac.scan.scan`."""
        return Choice(
            include=tuple(self.layers.include),
            exclude=tuple(self.layers.exclude),
            types=DEFAULT_TYPES if self.layers.types is None else tuple(self.layers.types),
            max_dim=self.max_dim,
            large_input=self.factor.large_input,
            large_output=self.factor.large_output,
            max_outputs=self.layers.max_outputs,
            gradients=self.factor.fisher != "activations_only",
        )

    @property
    def schedule(self) -> Schedule:
        """What is due when."""
        update, refresh = self.factor.update_interval, self.eigenbasis.refresh_interval
        return Schedule(update, update.times(5) if refresh is None else refresh, self.burn_in.chosen)


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
    rungs = [(key, given("eigenbasis", key)) for key in ("keep_below", "values_below", "qr_below")]
    rungs = [(key, value) for key, value in rungs if isinstance(value, (int, float)) and value]
    for (low, a), (high, b) in pairwise(rungs):
        if a > b:
            errors.append(f"kfac.eigenbasis.{low} ({a}) must not be above kfac.eigenbasis.{high} ({b})")
    every = given("eigenbasis", "exact_every")
    if rungs and type(every) is int and every > 1:
        errors.append(
            f"kfac.eigenbasis.exact_every ({every}) takes QR steps without a look, kfac.eigenbasis.{rungs[0][0]} "
            f"({rungs[0][1]}) looks first; set one of them"
        )
    return errors + (_with_inverses(given) if given("preconditioner", "method") == "inverse" else [])


def _with_inverses(given: Callable[[str, str], Any]) -> list[str]:
    """What method "inverse" rules out; ``given(block, key)`` is what the config has, or None."""
    why = 'kfac.preconditioner.method "inverse" keeps no eigenbasis, so'
    errors = []
    if given("preconditioner", "eigenvalues") == "corrected":
        errors.append(f'{why} kfac.preconditioner.eigenvalues must be "kronecker"; or use method "eigen"')
    if given("preconditioner", "exponent") not in (None, 1):
        got = given("preconditioner", "exponent")
        errors.append(f'{why} kfac.preconditioner.exponent ({got}) must be 1; or use method "eigen"')
    for key in ("keep_below", "values_below", "qr_below", "carry_moments"):
        if given("eigenbasis", key):
            errors.append(f'{why} kfac.eigenbasis.{key} must be left out; or use method "eigen"')
    if type(given("eigenbasis", "exact_every")) is int and given("eigenbasis", "exact_every") > 1:
        errors.append(f'{why} kfac.eigenbasis.exact_every must be 1 or left out; or use method "eigen"')
    if given("preconditioner", "stack_layers"):
        errors.append(f'{why} kfac.preconditioner.stack_layers must be false or left out; or use method "eigen"')
    if given("preconditioner", "precision") == "mixed":
        errors.append(
            'kfac.preconditioner.precision "mixed" would round inverses to bf16, which moves the sharpest directions '
            'most; with method "inverse" it must be "highest" or "tf32"'
        )
    if given("damping", "kind") == "tikhonov":
        ways = (
            'A and G of a layer have to be on one rank, as the damping of one needs the other; use damping "relative"'
        )
        if given("assignment", "split_factors"):
            errors.append(f'kfac.assignment.split_factors with method "inverse" and damping "tikhonov": {ways}')
        if given("layers", "max_outputs"):
            errors.append(f'kfac.layers.max_outputs with method "inverse" and damping "tikhonov": {ways}')
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
