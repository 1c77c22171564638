"""Define and check the keys of the ``"kfac"`` block. Each inner block has a pydantic model. The
parameters of KFACAdamW are here too, and ``directions/kfac_adamw/optimizer.py`` checks them.

docs/reference/config.md is made from the keys' docstrings. The first paragraph of a docstring has
25 words at most and becomes the key's row in a table. The other paragraphs go below the table."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ds_kfac.config import values
from ds_kfac.schedule.timetable import BurnIn, Schedule, Value

# modules that import torch are imported where they are used: commands that only print keys do not
# need them
if TYPE_CHECKING:
    from ds_kfac.model.scan import LayerChoice

SHARES = True
"""Whether several layers may share one factor A: layers with the same input, or the experts of a
stack. A test may set this to False."""


class Block(BaseModel):
    """A block of keys: an unknown key is an error, and values are not converted."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )
    _numbers_fit = field_validator("*", mode="before")(values.fits)


class FactorConfig(Block):
    """The factors A and G."""

    update_interval: values.Interval = Value.constant(10)
    """Steps between two updates of the factors. Each update uses one batch."""
    decay: values.Decay = Value.constant(0.95)
    """Weight of earlier batches in a factor's running average. The average is bias-corrected, so
    at first it is nearly a plain mean."""
    fisher: Literal["empirical", "monte_carlo", "activations_only"] | None = None
    """The gradients from which G is computed. null: ``activations_only`` with the optimizer
    KFACAdamW, ``empirical`` with any other optimizer.

    ``empirical`` uses the training gradients. ``monte_carlo`` (the true Fisher matrix) uses
    gradients for labels that are drawn from the model's own prediction. This costs an extra
    backward pass in each factor update, and memory for its graph.
    ``activations_only`` uses no gradients: G is the identity."""
    sampler: Literal["cross_entropy", "mse", "squared_error"] = "cross_entropy"
    """The loss for which ``monte_carlo`` draws labels.

    ``mse`` is a mean over all elements of the prediction. ``squared_error`` is a sum over the
    outputs and a mean over all other dimensions. Set ``engine.kfac.sampler`` to draw labels with
    your own function."""
    prediction: str | None = None
    """Name of the module whose output is the prediction for ``monte_carlo``. null: the whole model.
    If the output has ``logits``, these are the prediction."""
    weight_sharing: Literal["expand", "reduce"] = "expand"
    """What counts as one row of the statistics. ``expand``: a token. ``reduce``: a sequence or an
    image.

    Use ``expand`` for a loss per token and ``reduce`` for a loss per example. ``reduce`` makes the
    statistics cheaper by a factor of the sequence length."""
    loss_mean: Literal["micro_batch", "step"] = "micro_batch"
    """The rows over which your loss is a mean.

    ``micro_batch``: the loss of each backward pass is a mean over its own rows. ``step``: your
    program divides each sum of losses by the number of loss terms in all micro-batches on all
    ranks, as HF Trainer does for causal language models. ``step`` needs ``factor.rows`` ``"all"``.
    This key affects G only if micro-batches have different numbers of rows."""
    rows: values.Rows | None = None
    """Number of rows that each factor update uses. null: 4 per column of the factor. ``"all"``: all
    rows of all ranks, without sampling.

    If a single rank has more rows than an update uses, only every k-th of its rows is used.
    Positions of a convolution are sampled on a grid. Every update samples different rows, and the
    samples are unbiased."""
    dense_max: int | None = Field(default=None, ge=2)
    """Longest side of a weight matrix for which the factor is one dense matrix. null: 4096.

    If a side is longer than this value, its factor is cut into blocks. Blocks are about as long as
    the weight's other side, but at least half as long as this value. If a side is longer than
    16384, such as a head's vocabulary, its factor is diagonal. With ``fisher``
    ``activations_only``, only input sides have factors, and this limit is 65536."""

    @property
    def mean_over_step(self) -> bool:
        """Whether the loss is a mean over the whole step instead of each micro-batch."""
        return self.loss_mean == "step"


class EigenbasisConfig(Block):
    """When and how eigenbases are refreshed."""

    refresh_interval: values.Interval | None = None
    """Steps between two decompositions of a factor. Must be a multiple of
    ``factor.update_interval``. null: five times ``factor.update_interval``.

    If this key or ``factor.update_interval`` is a schedule, a refresh may fall between two factor
    updates. The refresh then waits for the next update."""


class DampingConfig(Block):
    """What is added to the Fisher matrix's eigenvalues."""

    value: values.Positive | None = None
    """Size of the damping. null: 0.001 with ``tikhonov``, 1 with ``relative``."""
    kind: Literal["tikhonov", "relative"] = "relative"
    """``tikhonov``: add ``damping.value`` itself. ``relative``: add ``damping.value`` times the
    layer's mean eigenvalue (A's mean eigenvalue times G's)."""

    def at(self, step: int) -> float:
        """Return the damping's size at a step. Call this only after ``resolve()``."""
        assert self.value is not None
        return self.value.at(step)


class PreconditionerConfig(Block):
    """How gradients are preconditioned. With the optimizer KFACAdamW, only ``precision`` has an
    effect, and ``method`` must be ``eigen``."""

    precision: Literal["highest", "tf32"] | None = None
    """Precision of the matrix products that rotate into the eigenbasis and back. null: ``tf32`` on
    GPUs that support it, else ``highest``.

    ``highest`` is fp32, even if the process allows TF32. With ``tf32``, GPUs compute products in
    TF32 and orthogonalization in fp16. Other devices compute both in fp32. With the method
    ``inverse``, this key applies to the two products with the inverses."""
    method: Literal["eigen", "inverse"] = "eigen"
    """What is computed from a factor. ``eigen``: its eigenbasis. ``inverse``: its damped inverse by
    Cholesky, with KAISA's pi-damping.

    Compared with ``eigen``, ``inverse`` computes half as many products in a step, sends half as
    many bytes to other gradient workers and refreshes about ten times as fast. Use it for sides of
    4096 and up. A change of damping takes effect at the next refresh. ``inverse`` needs
    ``eigenvalues`` ``kronecker``."""
    eigenvalues: Literal["kronecker", "corrected"] | None = None
    """Eigenvalues of the Fisher matrix in the eigenbasis. ``kronecker``: products of the factors'
    eigenvalues (K-FAC). ``corrected``: the rotated gradient's running second moment (EKFAC).

    null: ``corrected`` if your optimizer's steps do not depend on the size of the gradients, as
    with Adam or Lion, else ``kronecker``."""
    kl_clip: values.NotNegative | None = None
    """Bound kappa. The preconditioned gradient V is scaled down if lr^2 <V, gradient>, summed over
    layers, exceeds kappa. 0: no bound. null: 0.001.

    If DeepSpeed runs a scheduler, lr is the largest learning rate of its schedule. Otherwise lr is
    the current learning rate."""

    def kl_clip_at(self, step: int) -> float:
        """Return the bound at a step; 0 means no clipping. Call this only after ``resolve()``."""
        assert self.kl_clip is not None
        return self.kl_clip.at(step)


class BurnInConfig(Block):
    """Shorter intervals at the start of a run, where curvature changes fastest."""

    steps: int = Field(default=50, ge=0)
    """Number of initial steps in which updates and refreshes are more frequent. 0: none.

    In these steps factors are updated twice as often as ``factor.update_interval`` says.
    Eigenbases are refreshed at every second update, or more often if
    ``eigenbasis.refresh_interval`` says so."""


class AdamConfig(Block):
    """The optimizer KFACAdamW. These keys do not affect other optimizers."""

    rotate: bool = True
    """true: run Adam in the eigenbasis of A. false: run Adam in the weight's own coordinates,
    without curvature or whitening.

    If this key is false, K-FAC collects, keeps and sends no statistics."""
    except_layers: list[values.NameEnd] = [
        "([^.]*_)?head(_dist)?",
        "score",
        "classifier",
        "(classifier|classification_head)\\.out_proj",
        "head\\.fc",
        "embed_out",
        "decoder",
        "vocab_projector",
        "qa_outputs",
    ]
    """Layers whose steps keep Adam's direction, as heads do in Muon runs. Steps of other layers,
    except norms, are orthogonalized.

    Each entry is a regex for the end of a layer's name. The match must start after a dot or at the
    beginning of the name. ``".*"`` matches all layers. You may leave out the parts that PEFT or
    torch.compile add to a name. The default matches the heads of transformers and timm. Unless you
    set this key, the last layer also counts as a head if its weight is shaped like an embedding."""
    blocks: dict[values.NameEnd, values.BlockRows] = {}
    """Weights that hold several linear maps, each orthogonalized separately. The object maps a
    regex for the end of a weight's name to blocks.

    A number n cuts a weight into n equal blocks. A list gives each block's number of rows,
    and is repeated until it covers all rows. ``{"qkv": 3}`` means queries, keys and values.
    ``{"qkv": [64, 64, 64]}`` means queries, keys and values of each head of size 64.
    ``{"q_proj": 32}`` treats each of 32 heads by itself, and ``{"q_proj": 1}`` treats all heads as
    one map. This key overrides the splits that ds_kfac makes by module name
    (``ds_kfac/model/blocks.py``): fused QKV, gates, latent attention and Mamba. The full report
    lists each layer's blocks."""
    whiten: float = Field(default=0.125, ge=0, le=1)
    """Power p. A step is multiplied by A^-p before it is orthogonalized, and again afterwards. 0:
    no whitening.

    Power 0 bounds how much a step changes the weights. Power 1/2 bounds how much it changes the
    layer's outputs."""


Kind = Literal[
    "Linear",
    "Conv1D",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "LayerNorm",
    "RMSNorm",
    "BatchNorm",
    "GroupNorm",
]


class LayersConfig(Block):
    """Which layers are preconditioned. Python regexes may match any part of a module's name."""

    include: list[values.Pattern] = []
    """If not empty, precondition only modules whose names match one of these regexes."""
    exclude: list[values.Pattern] = []
    """Do not precondition modules whose names match one of these regexes."""
    types: list[Kind] | None = None
    """Layer types to precondition. null: Linear, Conv1D and all convolutions.

    Conv1D is the linear layer of GPT-2 in transformers; Conv1d is torch's convolution."""


class AssignmentConfig(Block):
    """Which ranks work on which layer."""

    gradient_worker_fraction: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the ranks that precondition each layer (KAISA), at stage 0. null: the fraction
    predicted to be fastest within ``memory_budget_gb``.

    In KAISA's terms, a fraction of 1/world is MEM-OPT, and a fraction of 1 is COMM-OPT. Under
    ZeRO 1 to 3 a layer always has one worker."""
    memory_budget_gb: float | None = Field(default=None, gt=0)
    """Limit on the memory that K-FAC takes on a rank, in 10^9 bytes. null: no limit.

    The limit covers the state (factors, eigenbases, moments) and the batch sums, gradients and
    results of a step. It does not cover the buffers of messages."""


class CommunicationConfig(Block):
    """What ranks send to each other."""

    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype in which batch sums and eigenvectors are sent. Sums are added in fp32, and inverses are
    sent in fp32.

    null: bf16 if the model is in 16 bits and sending in fp32 is predicted to take over 2 % of
    K-FAC's time per step, else fp32."""


class OffloadConfig(Block):
    """Where K-FAC's state is kept between steps."""

    device: Literal["none", "cpu"] = "none"
    """``cpu``: keep factors, and the earlier values that ``adaptive`` needs, in (pinned) host
    memory.

    Eigenbases and moments stay on the device, because every step needs them."""


class CheckpointConfig(Block):
    """What is saved in addition to DeepSpeed's files."""

    grams: bool = False
    """Also write every layer's A to ``<tag>/grams``, as a lower triangle in bf16.

    Merging by RegMean and quantization by GPTQ need A. Resuming does not."""
    on_missing: Literal["error", "fresh"] = "error"
    """What load_checkpoint does if the K-FAC state is missing, damaged or from another model.
    ``error``: raise on every rank. ``fresh``: warn, and start K-FAC afresh.

    In both cases DeepSpeed has already loaded the weights and the optimizer. If a checkpoint was
    written without K-FAC, K-FAC always starts afresh, with a warning."""


class OpsConfig(Block):
    """Which implementation of the operations is used."""

    backend: Literal["triton", "cuda", "torch"] | None = None
    """Implementation of the operations. null: for each operation, the best one that runs here.

    ``triton`` and ``cuda`` have kernels for some operations. The kernels run on NVIDIA GPUs from
    compute capability 8.0, and are compiled at first use. Other operations run in torch. ``torch``
    is plain torch. It runs on any device, without a CUDA graph. All engines of a process use the
    backend of the engine to which K-FAC was attached last."""


NAME = "KFACAdamW"
"""The optimizer's type in a DeepSpeed config."""


class OptimizerParams(BaseModel):
    """``null`` and ``"auto"`` mean the same as leaving a parameter out. A framework may replace
    ``"auto"`` by a value."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    lr: float = Field(0.001, ge=0)
    """Learning rate of the layers' weights and of other matrices. Schedulers scale ``adam_lr`` by
    the same factor."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2
    )
    """Decay of the two moments, which a layer keeps in its eigenbasis. Our measurements on language
    models use [0.9, 0.95]."""
    eps: float = Field(1e-8, ge=0)
    """Number that is added to the square root of the second moment."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay: a step subtracts lr * weight_decay times the parameter.

    The decay of all parameters uses lr, not ``adam_lr``. A layer that is unused in a step does not
    decay in that step."""
    adam_lr: float | None = Field(None, ge=0)
    """Learning rate of embeddings, of norms, and of biases outside K-FAC layers. null: 8 lr. 0:
    they are frozen, without weight decay.

    The learning rate of heads depends on ``adam_lr`` (docs/howto/tune.md). If ``adam_lr`` is 0,
    heads use lr."""
    torch_adam: bool = False
    """Which AdamW updates the parameters outside K-FAC layers. true: torch's. false: DeepSpeed's.

    DeepSpeed's fused Adam (on a GPU) and CPU Adam (for an offloaded optimizer) are compiled at
    first use. On a CPU without offload torch's AdamW is used for either value."""


DEFAULTS: dict[str, Any] = {
    name: field.default for name, field in OptimizerParams.model_fields.items()
}
"""dict from parameter name to default."""


class KFACConfig(Block):
    """The ``"kfac"`` block. A key that is ``null`` or left out means "choose for me".

    A key of type :class:`Value` takes a number, ``{"schedule": "linear" | "cosine" | "exponential",
    "start": x, "end": y, "steps": n, "delay": d}`` or ``{"schedule": "piecewise", "values": [...],
    "steps": [...]}``. Schedules count the applied steps since the start of the run.
    """

    enabled: bool = True
    """false: K-FAC is not attached, and the engine stays as DeepSpeed made it."""
    report: Literal["summary", "full", "none"] = "summary"
    """What rank 0 prints to standard error when K-FAC attaches. ``summary``: at most 12 lines.

    ``full`` adds the values chosen for null keys, and every layer with the ranks that work on it.
    ``none`` prints nothing, and keeps K-FAC's numbers out of a framework's logs.
    ``engine.kfac.report`` always has the full text, but equal layers share a row in it unless this
    key is ``full``."""
    factor: FactorConfig = FactorConfig()
    eigenbasis: EigenbasisConfig = EigenbasisConfig()
    burn_in: BurnInConfig = BurnInConfig()
    damping: DampingConfig = DampingConfig()
    preconditioner: PreconditionerConfig = PreconditionerConfig()
    adam: AdamConfig = AdamConfig()
    layers: LayersConfig = LayersConfig()
    assignment: AssignmentConfig = AssignmentConfig()
    communication: CommunicationConfig = CommunicationConfig()
    offload: OffloadConfig = OffloadConfig()
    ops: OpsConfig = OpsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    adaptive: float | None = Field(default=None, gt=0)
    """Tolerance of SP-NGD's adaptive rule, such as 0.1. A factor with a smaller relative change
    counts as similar to its earlier value. null: off.

    A factor that barely changes is updated and decomposed less often. Each factor has its own
    interval, in units of ``factor.update_interval``. The interval grows (1, 2, 3, 5, 8, ...) while
    the factor stays similar, and halves when it does not. The rule starts after the burn-in.
    docs/explanation/formulas.md has the formulas."""
    rescale_weights: bool = False
    """After every step, multiply the weight of each linear and convolutional K-FAC layer by min(1,
    sqrt(2 * outputs) / norm of the weight)."""

    def having(self, block: str, **new: Any) -> "KFACConfig":
        """Return a copy in which keys of one block have new values."""
        return self.model_copy(update={block: getattr(self, block).model_copy(update=new)})

    # use these only after resolve(), which replaces nulls by values

    @property
    def choice(self) -> "LayerChoice":
        """The settings that decide which layers are preconditioned, and how."""
        from ds_kfac.curvature.methods import METHODS
        from ds_kfac.model.scan import LayerChoice

        assert self.layers.types is not None
        needs_pairs = METHODS[self.preconditioner.method].paired(self.damping.kind)
        return LayerChoice(
            tuple(self.layers.include),
            tuple(self.layers.exclude),
            tuple(self.layers.types),
            self.factor.dense_max,
            gradients=self.factor.fisher != "activations_only",
            blocks=tuple(self.adam.blocks.items()),
            shares=SHARES and not needs_pairs,
        )

    @property
    def schedule(self) -> Schedule:
        """When factors are updated and decomposed."""
        assert self.eigenbasis.refresh_interval is not None
        update = self.factor.update_interval
        burn_in = None
        if self.burn_in.steps:
            half_interval = max(1, (update.interval_at(0) + 1) // 2)
            burn_in = BurnIn(self.burn_in.steps, half_interval, 2 * half_interval)
        return Schedule(update, self.eigenbasis.refresh_interval, burn_in)


def parse(block: Any) -> KFACConfig:
    """Check a ``"kfac"`` block.

    Raises:
        ValueError: the block has errors. The message lists all of them: unknown keys (with the
            nearest valid key), wrong types, values out of range, and keys that contradict each
            other.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f'"kfac" must be an object such as {{"enabled": true}}, got {block!r}')
    config = None
    errors: list[str] = []
    try:
        config = KFACConfig(**values.without_nulls(block, KFACConfig))
    except ValidationError as error:
        errors = [values.explain(detail, block, KFACConfig) for detail in error.errors()]
    errors += _contradictions(block)
    if config is None or errors:
        raise ValueError('invalid DeepSpeed config, block "kfac":\n  ' + "\n  ".join(errors))
    return config


def _contradictions(block: Mapping[str, Any]) -> list[str]:
    """Return an error message for each constraint between keys that the block violates. This
    function reads the raw block, so that these errors are reported together with all others."""
    from ds_kfac.curvature.methods import METHODS

    def given(section: str, key: str) -> Any:
        """Return a key's raw value; None if the key is left out or "auto"."""
        inside = block.get(section)
        value = inside.get(key) if isinstance(inside, Mapping) else None
        return None if value == values.AUTO else value

    errors = []
    update = given("factor", "update_interval")
    refresh = given("eigenbasis", "refresh_interval")
    if update is None:
        update = FactorConfig().update_interval.interval_at(0)
    # schedules are not checked: their refreshes wait for the next factor update
    both_are_counts = all(
        type(interval) is int and 1 <= interval <= values.LARGEST for interval in (update, refresh)
    )
    if both_are_counts and refresh % update:
        errors.append(
            f"kfac.eigenbasis.refresh_interval ({refresh}) must be a multiple of "
            f"kfac.factor.update_interval ({update}); otherwise a refresh would use old factors"
        )
    name = given("preconditioner", "method")
    method = METHODS.get(name) if isinstance(name, str) else None
    has_no_eigenbasis = method is not None and not method.rotates
    if has_no_eigenbasis and given("preconditioner", "eigenvalues") == "corrected":
        errors.append(
            f'kfac.preconditioner.method "{name}" keeps no eigenbasis, so '
            'kfac.preconditioner.eigenvalues must be "kronecker"; or use method "eigen"'
        )
    if given("factor", "loss_mean") == "step":
        if given("factor", "rows") != "all":
            errors.append(
                'kfac.factor.loss_mean "step" needs the rows of all ranks: set kfac.factor.rows to '
                '"all"'
            )
        if given("factor", "fisher") == "monte_carlo":
            errors.append(
                'kfac.factor.loss_mean "step" does not fit kfac.factor.fisher "monte_carlo": the '
                "sampled loss is a mean over each micro-batch; leave loss_mean out"
            )
    return errors
