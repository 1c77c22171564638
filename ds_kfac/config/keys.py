"""The keys of the ``"kfac"`` block, a model for each block inside it, and its check; and the
parameters of KFACAdamW, which ``directions/kfac_adamw/optimizer.py`` checks. Docstrings are the
manual."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ds_kfac.config import values
from ds_kfac.schedule.timetable import BurnIn, Schedule, Value

# what knows torch is imported where it is used: commands that only print keys do without
if TYPE_CHECKING:
    from ds_kfac.model.scan import LayerChoice

SHARES = True
"""Whether layers that see one input, and the experts of a stack, share one A; a test may set it to
false."""


class Block(BaseModel):
    """A block of keys: an unknown key is an error, and values are not converted."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )
    _numbers_fit = field_validator("*", mode="before")(values.fits)


class FactorConfig(Block):
    """The factors A and G."""

    update_interval: values.Interval = Value.constant(10)
    """Update the factors with one batch every so many steps."""
    decay: values.Decay = Value.constant(0.95)
    """Weight of the past in the running average; bias-corrected, so early averages are plain
    means."""
    fisher: Literal["empirical", "monte_carlo", "activations_only"] | None = None
    """Which gradients G is made of. empirical: the training gradients. monte_carlo: gradients of
    labels drawn from the model's own prediction, at the cost of one extra backward per factor
    update. activations_only: none, G is the identity. null: activations_only with the optimizer
    KFACAdamW, empirical with any other."""
    sampler: Literal["cross_entropy", "mse", "squared_error"] = "cross_entropy"
    """monte_carlo: the distribution that labels are drawn from. mse: a mean over all elements of
    the output. squared_error: a sum over the outputs, a mean over the rest. Set
    ``engine.kfac.sampler`` to draw by a function of your own."""
    prediction: str | None = None
    """monte_carlo: name of the module whose output is the prediction; null: the model's output, or
    its ``logits``."""
    weight_sharing: Literal["expand", "reduce"] = "expand"
    """expand: every token is a row; use it for a loss per token. reduce: every sequence or image is
    a row; use it for a loss per example. reduce is cheaper by the sequence length."""
    rows: values.Rows | None = None
    """Rows that count, per factor update. They come from as few ranks as have that many, the
    owner's node first, others at every update. Where one rank has more, every k-th of its rows
    counts, and k's offset moves from update to update. Positions of a convolution are sampled as
    well, on a grid that moves: one in 4 along both dimensions, fewer where less than 4 rows would
    be left for each column. So the cost of statistics is bounded, and falls with the number of
    ranks. Unbiased. all: every row of all ranks, at every position. null: 4 per column."""
    dense_max: int | None = Field(default=None, ge=2)
    """Longest side whose factor is one dense matrix. Longer ones are cut into blocks about as long
    as the layer's other side, at least half of this: a decomposition costs the cube. A side over
    16384, such as a head's vocabulary (65536 with fisher activations_only, where all sides are
    inputs), has a diagonal. null: 4096."""


class EigenbasisConfig(Block):
    """When and how eigenbases are refreshed."""

    refresh_interval: values.Interval | None = None
    """Steps between two decompositions, a multiple of factor.update_interval; null: five times that
    interval. If one of them is a schedule, a refresh waits for the next factor update."""


class DampingConfig(Block):
    """What is added to the Fisher's eigenvalues."""

    value: values.Positive | None = None
    """Size of the damping; null: 0.001 with tikhonov, 1 with relative."""
    kind: Literal["tikhonov", "relative"] = "relative"
    """tikhonov: add the value itself. relative: add the value times the layer's mean eigenvalue,
    mean(A) mean(G)."""

    def at(self, step: int) -> float:
        assert self.value is not None
        return self.value.at(step)


class PreconditionerConfig(Block):
    """The step in the eigenbasis. Without effect for the optimizer KFACAdamW, whose step is Adam's,
    except ``precision``."""

    precision: Literal["highest", "tf32"] | None = None
    """Precision of the products into the eigenbasis and back. highest: fp32, also if the process
    allows TF32. tf32: TF32 on GPUs, fp32 elsewhere. null: tf32 on GPUs that have it, else highest.
    Orthogonalization is in fp16 with TF32, else in fp32. With method inverse it applies to the two
    products with the inverses."""
    method: Literal["eigen", "inverse"] = "eigen"
    """What is kept of a factor. eigen: its eigenbasis. inverse: its damped inverse by Cholesky,
    with KAISA's pi-damping: half the products of a step, half the bytes to other workers, refreshes
    about ten times cheaper; for sides of 4096 and up. The damping of an inverse is that of its last
    refresh. It needs eigenvalues kronecker."""
    eigenvalues: Literal["kronecker", "corrected"] | None = None
    """Eigenvalues of the Fisher in the eigenbasis. kronecker: products of the factors' eigenvalues
    (K-FAC). corrected: the running second moment of the rotated gradient (EKFAC). null: corrected
    if your optimizer divides by a running second moment too, as Adam does, else kronecker."""
    kl_clip: values.NotNegative | None = None
    """Bound kappa on lr^2 <V, gradient> summed over layers, lr the schedule's largest if DeepSpeed
    runs an lr scheduler, else the current one; 0 switches it off, null chooses 0.001."""

    def kl_clip_at(self, step: int) -> float:
        """0: no clipping at that step."""
        assert self.kl_clip is not None
        return self.kl_clip.at(step)


class BurnInConfig(Block):
    """Shorter intervals at the start of a run, where curvature changes fastest."""

    steps: int = Field(default=50, ge=0)
    """Number of first steps in which factors are updated twice as often as factor.update_interval
    says at first, and eigenbases refreshed at every second update, if that is more often; the step
    after them refreshes all. 0: none."""


class AdamConfig(Block):
    """The optimizer KFACAdamW; without effect for others. Its lr, betas, .. are in the optimizer's
    own block."""

    rotate: bool = True
    """Step in the eigenbasis of A. false: no curvature at all: the step is in the layers' own
    coordinates, without whitening, and nothing is captured, kept or sent."""
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
    """Layers that keep Adam's direction, as heads do with Muon; the directions of all others are
    replaced by their orthogonal factor (Newton-Schulz) at a fixed size. Regexes for the end of a
    layer's name, after a dot or from its beginning; ".*" is all layers. What PEFT or torch.compile
    put behind a name may be left out. The default matches the heads of transformers and timm, and
    without a list of yours a language model's head is found by its shape, too: the last layer, with
    the shape of an embedding. Norms always keep Adam's."""
    blocks: dict[values.NameEnd, values.BlockRows] = {}
    """Matrices that hold several maps, each of which is orthogonalized and sized by itself: a regex
    for the end of the weight's name -> how many equal ones follow each other, or their rows,
    repeated up to the last row. ``{"qkv": 3}``: queries, keys, values; ``{"qkv": [64, 64, 64]}``:
    the same for each head of 64; ``{"q_proj": 32}``: each of 32 heads by itself; 1: a single map.
    Goes before what is known by name (``ds_kfac/model/blocks.py``): fused queries, keys and values,
    gates, latent attention and Mamba. The report has each layer's, and which have none."""
    whiten: float = Field(default=0.125, ge=0, le=1)
    """Power p of A^-p on both sides of an orthogonalization, which bounds the response to each
    input direction in place of the weights'; 0: none. Worth most with large batches, and lets the
    rate be higher there."""


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
    """Which layers; Python regexes searched in module names."""

    include: list[values.Pattern] = []
    """If not empty: precondition only modules that match one of these."""
    exclude: list[values.Pattern] = []
    """Leave modules that match one of these to the optimizer alone."""
    types: list[Kind] | None = None
    """Layer types to precondition. Conv1D is the linear layer of transformers' GPT-2, Conv1d
    torch's convolution. null: Linear, Conv1D and all convolutions."""


class AssignmentConfig(Block):
    """Who does what."""

    gradient_worker_fraction: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the ranks that hold a layer's eigenbases and precondition its gradient (KAISA),
    where gradients are replicated (stage 0): 1/world is MEM-OPT, 1 is COMM-OPT. null: the fastest
    predicted fraction within memory_budget_gb. Under ZeRO 1-3 gradients are partitioned and a layer
    always has one worker."""
    memory_budget_gb: float | None = Field(default=None, gt=0)
    """Most memory of K-FAC per rank, in 10^9 bytes: state (factors, eigenbases, moments), and batch
    sums, gradients and results while a step lasts; without messages, of 256 MiB at most. null: no
    limit."""


class CommunicationConfig(Block):
    """What travels, and in which dtype."""

    dtype: Literal["fp32", "bf16"] | None = None
    """dtype in which batch sums and eigenvectors travel; sums are added in fp32, inverses travel in
    fp32. null: bf16 if the model is in 16 bits and the traffic is predicted to cost over 2 % of a
    step's K-FAC work, else fp32."""


class OffloadConfig(Block):
    """Where K-FAC state lies between steps."""

    device: Literal["none", "cpu"] = "none"
    """cpu: keep running factors and their history in (pinned) host memory. Eigenbases and moments
    stay on the device, because every step needs them."""


class CheckpointConfig(Block):
    """What is saved in addition to DeepSpeed's files."""

    grams: bool = False
    """true: also write A of every layer in bf16, half of its triangle, to ``<tag>/grams``: what
    merging by RegMean and quantization by GPTQ need beside the weights (docs/factors.md). It takes
    no part in resuming."""
    on_missing: Literal["error", "fresh"] = "error"
    """What load_checkpoint does if the K-FAC state that a checkpoint names is missing, damaged or
    of another model. error: raise on every rank. fresh: warn and start K-FAC afresh. DeepSpeed has
    loaded weights and optimizer before, in both cases. A checkpoint written without K-FAC always
    starts K-FAC afresh, with a warning."""


class OpsConfig(Block):
    """Which code computes."""

    backend: Literal["triton", "cuda", "torch"] | None = None
    """Implementation of the operations. triton, cuda: on NVIDIA GPUs from compute capability 8.0,
    each for some operations. torch: plain torch, anywhere, and no CUDA graph. An operation that a
    backend does not have runs in torch. null: the best backend that runs here, per operation; the
    attach report lists them. All except torch are compiled at first use. The choice holds for the
    process: the last attach decides."""


NAME = "KFACAdamW"
"""The optimizer's type in a DeepSpeed config."""


class OptimizerParams(BaseModel):
    """``null`` and ``"auto"`` are the same as leaving a parameter out. A framework may fill in
    ``"auto"``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    lr: float = Field(0.001, ge=0)
    """Learning rate of the layers' weights and of other matrices. Schedulers change it and adam_lr
    alike. docs/tuning.md has rates that were measured."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2
    )
    """Decay of the two moments, which a layer has in its eigenbasis. The measured language models
    have [0.9, 0.95]."""
    eps: float = Field(1e-8, ge=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled: a step takes lr * weight_decay of each parameter, also of those that are stepped
    at adam_lr. A layer that a step did not use does not decay in it."""
    adam_lr: float | None = Field(None, ge=0)
    """Rate of embeddings, norms and biases that are in no layer; heads have one that follows it
    (docs/tuning.md). null: 8 lr. 0: they stand still, without weight decay, and heads have lr."""
    torch_adam: bool = False
    """true: torch's AdamW steps what is in no layer. false: DeepSpeed's fused Adam on a GPU, and
    its CPU Adam for an offloaded optimizer, which are compiled at first use. On a CPU without
    offload it is torch's in both cases."""


DEFAULTS: dict[str, Any] = {
    name: field.default for name, field in OptimizerParams.model_fields.items()
}
"""Parameter -> its default."""


class KFACConfig(Block):
    """The ``"kfac"`` block. ``null`` or leaving a key out means "choose for me".

    A key of type :class:`Value` takes a number, ``{"schedule": "linear" | "cosine" | "exponential",
    "start": x, "end": y, "steps": n, "delay": d}`` or ``{"schedule": "piecewise", "values": [...],
    "steps": [...]}``, in applied steps since the start of the run.
    """

    enabled: bool = True
    """false: the engine is left as DeepSpeed made it."""
    report: Literal["summary", "full", "none"] = "summary"
    """What rank 0 prints to standard error at attach, long lines broken at the terminal's width.
    summary: at most 12 lines, before they are broken. full: also what was chosen, and every layer
    with the ranks that work on it. none: nothing, and no numbers in a framework's logs.
    ``engine.kfac.report`` has the text in any case, with equal layers in one row unless it is
    full."""
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
    """SP-NGD's adaptive statistics, a factor that barely changes is captured, reduced and
    decomposed less often: two values of a factor are similar if their relative difference in the
    Frobenius norm is below this, such as 0.1. Each factor then has its own interval, in units of
    factor.update_interval, which grows (1, 2, 3, 5, 8, ...) while the factor stays similar to its
    last two values, and halves when it does not. Starts after the burn-in. null: off."""
    rescale_weights: bool = False
    """After every step multiply the weight of each linear and convolutional K-FAC layer by min(1,
    sqrt(2 outputs) / its norm), as SP-NGD does: for layers that a norm follows."""

    def having(self, block: str, **new: Any) -> "KFACConfig":
        """With other values in a block."""
        return self.model_copy(update={block: getattr(self, block).model_copy(update=new)})

    # after resolve(), which replaces nulls by values

    @property
    def choice(self) -> "LayerChoice":
        from ds_kfac.curvature.methods import METHODS
        from ds_kfac.model.scan import LayerChoice

        assert self.layers.types is not None
        layers, factor = self.layers, self.factor
        return LayerChoice(
            tuple(layers.include),
            tuple(layers.exclude),
            tuple(self.layers.types),
            factor.dense_max,
            gradients=factor.fisher != "activations_only",
            blocks=tuple(self.adam.blocks.items()),
            shares=SHARES and not METHODS[self.preconditioner.method].paired(self.damping.kind),
        )

    @property
    def schedule(self) -> Schedule:
        """When factors are updated and decomposed."""
        assert self.eigenbasis.refresh_interval is not None
        update, steps = self.factor.update_interval, self.burn_in.steps
        half = max(1, (update.interval_at(0) + 1) // 2)
        burn_in = BurnIn(steps, half, 2 * half) if steps else None
        return Schedule(update, self.eigenbasis.refresh_interval, burn_in)


def parse(block: Any) -> KFACConfig:
    """Check a ``"kfac"`` block.

    Raises:
        ValueError: one message with every error: unknown keys with the nearest valid one, wrong
            types and ranges, and keys that contradict each other.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f'"kfac" must be an object such as {{"enabled": true}}, got {block!r}')
    config, errors = None, []
    try:
        config = KFACConfig(**values.without_nulls(block, KFACConfig))
    except ValidationError as error:
        errors = [values.explain(detail, block, KFACConfig) for detail in error.errors()]
    errors += _contradictions(block)
    if config is None or errors:
        raise ValueError('invalid DeepSpeed config, block "kfac":\n  ' + "\n  ".join(errors))
    return config


def _contradictions(block: Mapping[str, Any]) -> list[str]:
    """Violated constraints between keys. Reads the raw block, so that they are reported together
    with other errors."""
    from ds_kfac.curvature.methods import METHODS

    def given(section: str, key: str) -> Any:
        inside = block.get(section)
        value = inside.get(key) if isinstance(inside, Mapping) else None
        return None if value == values.AUTO else value

    errors = []
    update, refresh = given("factor", "update_interval"), given("eigenbasis", "refresh_interval")
    update = FactorConfig().update_interval.interval_at(0) if update is None else update
    # schedules are not checked: their refreshes wait for the next factor update
    plain = all(
        type(interval) is int and 1 <= interval <= values.LARGEST for interval in (update, refresh)
    )
    if plain and refresh % update:
        errors.append(
            f"kfac.eigenbasis.refresh_interval ({refresh}) must be a multiple of "
            f"kfac.factor.update_interval "
            f"({update}); otherwise a refresh would see stale factors"
        )
    method = given("preconditioner", "method")
    keeps = METHODS.get(method) if isinstance(method, str) else None
    if (
        keeps is not None
        and not keeps.rotates
        and given("preconditioner", "eigenvalues") == "corrected"
    ):
        errors.append(
            f'kfac.preconditioner.method "{method}" keeps no eigenbasis, so '
            f"kfac.preconditioner.eigenvalues must be "
            '"kronecker"; or use method "eigen"'
        )
    return errors
