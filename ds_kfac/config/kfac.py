"""The ``"kfac"`` block of a DeepSpeed config: models, defaults, and errors that say all that is wrong at once."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from ds_kfac.config.errors import AUTO, explain, without_nulls
from ds_kfac.config.method import (
    AdamConfig,
    Block,
    BurnInConfig,
    DampingConfig,
    EigenbasisConfig,
    FactorConfig,
    PreconditionerConfig,
)
from ds_kfac.config.system import (
    AssignmentConfig,
    CheckpointConfig,
    CommunicationConfig,
    LayersConfig,
    OffloadConfig,
    OpsConfig,
    PaddingConfig,
)
from ds_kfac.config.values import LARGEST
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.model.scan import Choice
from ds_kfac.schedule.intervals import BurnIn, Schedule

KEY = "kfac"

SHARES = True
"""Whether layers that see one input have one A, and the experts of a stack: tests may want an A for each."""


class KFACConfig(Block):
    """The ``"kfac"`` block. ``null`` or leaving a key out means "choose for me".

    A key of type :class:`Value` takes a number, ``{"schedule": "linear" | "cosine" | "exponential", "start": x,
    "end": y, "steps": n, "delay": d}`` or ``{"schedule": "piecewise", "values": [...], "steps": [...]}``, in applied
    steps since the start of the run.
    """

    enabled: bool = True
    """false: the engine is left as DeepSpeed made it."""
    report: Literal["summary", "full", "none"] = "summary"
    """What rank 0 prints to standard error at attach. summary: at most 12 lines. full: also what was chosen, and every
    layer with the ranks that work on it. none: nothing. ``engine.kfac.report`` has the text in any case, with equal
    layers in one row unless it is full."""
    factor: FactorConfig = FactorConfig()
    eigenbasis: EigenbasisConfig = EigenbasisConfig()
    burn_in: BurnInConfig = BurnInConfig()
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
    adaptive: float | None = Field(None, gt=0)
    """SP-NGD's adaptive statistics, a factor that barely changes is captured, reduced and decomposed less often: two
    values of a factor are similar if their relative difference in the Frobenius norm is below this, such as 0.1. Each
    factor then has its own interval, in units of factor.update_interval, which grows (1, 2, 3, 5, 8, ...) while the
    factor stays similar to its last two values, and halves when it does not. Starts after the burn-in. null: off."""
    rescale_weights: bool = False
    """After every step multiply the weight of each linear and convolutional K-FAC layer by min(1, sqrt(2 outputs) / its
    norm), as SP-NGD does: for layers that a norm follows."""

    def having(self, block: str, **values: Any) -> "KFACConfig":
        """With other values in a block."""
        return self.model_copy(update={block: getattr(self, block).model_copy(update=values)})

    # of a config whose nulls are answered, see ds_kfac.plan.resolve

    @property
    def choice(self) -> Choice:
        """Which layers, for :func:`ds_kfac.model.scan.scan`."""
        assert self.layers.types is not None
        return Choice(
            include=tuple(self.layers.include),
            exclude=tuple(self.layers.exclude),
            types=tuple(self.layers.types),
            dense_max=self.factor.dense_max,
            gradients=self.factor.fisher != "activations_only",
            shares=SHARES and not FACTOR_FORMS[self.preconditioner.method].paired(self.damping.chosen),
            blocks=tuple(self.adam.blocks.items()),
        )

    @property
    def schedule(self) -> Schedule:
        """What is due when."""
        assert self.eigenbasis.refresh_interval is not None
        update, steps = self.factor.update_interval, self.burn_in.steps
        half = max(1, (update.interval_at(0) + 1) // 2)
        burn_in = BurnIn(steps, half, 2 * half) if steps else None
        return Schedule(update, self.eigenbasis.refresh_interval, burn_in)


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
        value = values.get(key) if isinstance(values, Mapping) else None
        return None if value == AUTO else value

    errors = []
    update, refresh = given("factor", "update_interval"), given("eigenbasis", "refresh_interval")
    update = FactorConfig().update_interval.interval_at(0) if update is None else update
    # Of schedules nothing is asked: their refreshes wait for the next factor update.
    plain = all(type(interval) is int and 1 <= interval <= LARGEST for interval in (update, refresh))
    if plain and refresh % update:
        errors.append(
            f"kfac.eigenbasis.refresh_interval ({refresh}) must be a multiple of kfac.factor.update_interval "
            f"({update}); otherwise a refresh would see stale factors"
        )
    method = given("preconditioner", "method")
    form = FACTOR_FORMS.get(method) if isinstance(method, str) else None
    errors += _of_step(given)
    return errors + (_without_basis(given) if form is not None and not form.rotates else [])


def _of_step(given: Callable[[str, str], Any]) -> list[str]:
    """What a step by the quadratic model rules out, and what only it has."""
    kind = given("damping", "kind")
    if given("preconditioner", "step") != "quadratic":
        if kind != "adaptive":
            return []
        return ['kfac.damping.kind "adaptive" needs the quadratic model of kfac.preconditioner.step "quadratic"']
    why = 'with kfac.preconditioner.step "quadratic"'
    needs = {"eigenvalues": "kronecker", "graft": "none", "method": "eigen", "kl_clip": 0}
    errors = [
        f"{why} kfac.preconditioner.{key} must be {needed!r}, got {given('preconditioner', key)!r}"
        for key, needed in needs.items()
        if given("preconditioner", key) not in (None, needed)
    ]
    if kind == "relative":
        errors.append(f'{why} damping is one number for the model: kfac.damping.kind must be "adaptive" or "tikhonov"')
    return errors


def _without_basis(given: Callable[[str, str], Any]) -> list[str]:
    """What a form without an eigenbasis rules out; ``given(block, key)`` is what the config has, or None."""
    if given("preconditioner", "eigenvalues") != "corrected":
        return []
    why = f'kfac.preconditioner.method "{given("preconditioner", "method")}" keeps no eigenbasis, so'
    return [f'{why} kfac.preconditioner.eigenvalues must be "kronecker"; or use method "eigen"']


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
