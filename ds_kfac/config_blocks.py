"""The blocks inside ``"kfac"`` on what is computed, one model each. Docstrings are their manual."""

from typing import Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ConfigDict, Field

from ds_kfac.config_values import Decay, Interval, NotNegative, Positive
from ds_kfac.schedule import BurnIn, Value


class Block(DeepSpeedConfigModel):
    """DeepSpeed's base, without its habit of coercing and of dropping "auto"."""

    # A default is a Value already, which the validators of its field do not take.
    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, frozen=True, validate_default=False)

    def __init__(self, **data: Any) -> None:
        BaseModel.__init__(self, **data)


class FactorConfig(Block):
    """The factors A and G."""

    update_interval: Interval = Value.constant(10)
    """Steps between two batches folded into the factors."""
    decay: Decay = Value.constant(0.95)
    """Weight of the past in the running average; bias-corrected, so early averages are plain means."""
    fisher: Literal["empirical", "monte_carlo", "activations_only"] | None = None
    """Where G comes from. empirical: the training gradients. monte_carlo: gradients for labels drawn from the model's
    own prediction, one extra backward on a factor update. activations_only: nowhere, G is the identity. null chooses
    activations_only with the optimizer KFACAdamW, empirical with any other."""
    sampler: Literal["cross_entropy", "mse"] = "cross_entropy"
    """monte_carlo: how labels are drawn; ``engine.kfac.sampler`` takes a function of your own."""
    prediction: str | None = None
    """monte_carlo: name of the module whose output is the prediction; null takes what the model returns, or the
    ``logits`` in it."""
    weight_sharing: Literal["expand", "reduce"] = "expand"
    """expand: every token is a row, for a loss per token. reduce: every sequence or image is one, for a loss per
    example; cheaper by the length."""
    sample_rows: int | None = Field(None, ge=1)
    """Take statistics of about so many rows a call and rank only, evenly spaced; null: of all."""
    max_dim: int | None = Field(None, ge=2)
    """Longest side that gets a dense factor (a vocabulary of 50,000 would take 5 GB packed); null chooses 16384."""
    large_input: Literal["blocks", "diagonal", "identity", "skip"] = "diagonal"
    """What a longer input side gets: blocks of at most max_dim, a diagonal, nothing; or skip leaves the layer to the
    optimizer."""
    large_output: Literal["blocks", "diagonal", "identity", "skip"] = "diagonal"
    """The same for a longer output side, such as a head's vocabulary."""

    def decay_at(self, step: int) -> float:
        return self.decay.at(step)


class EigenbasisConfig(Block):
    """When and how eigenbases are refreshed."""

    refresh_interval: Interval | None = None
    """Steps between two decompositions, a multiple of factor.update_interval; null chooses five times it
    (before rounding). If either is a schedule, a refresh waits for the next factor update."""
    method: Literal["eigh"] = "eigh"
    """Exact symmetric eigendecomposition."""
    keep_below: float = Field(0.0, ge=0, lt=1)
    """Warm start: an eigenbasis stays while what it misses of the new factor is below this part of it; 0: never. A
    first try: 0.02."""
    values_below: float = Field(0.0, ge=0, lt=1)
    """Warm start: up to here only the eigenvalues are computed again; 0: never. A first try: 0.1."""
    qr_below: float = Field(0.0, ge=0, lt=1)
    """Warm start: up to here one or two QR steps follow the old basis; above it, a decomposition. 0: never."""
    exact_every: int | None = Field(None, ge=1, le=100)
    """Of so many refreshes of a factor one is exact; the others are one QR step from its last eigenbasis (orthogonal
    iteration, as in SOAP), with no look at how far it turned. Cheaper on a GPU, hardly so on a CPU. Not together with
    keep_below, values_below or qr_below. null: 1, every refresh is exact."""
    stagger: bool | None = None
    """Spread the layers' captures and refreshes evenly over their intervals, from the end of the burn-in on, so that no
    step does more than its share. null: if a refresh of everything at once is predicted to take over 50 ms."""
    lag: int = Field(0, ge=0)
    """Refresh beside the training, on a thread (CPU) or stream (GPU) of its own, and use the result so many steps
    later, whenever it was done. 0: refresh in the step. Shorter refresh intervals than this shorten it."""
    carry_moments: bool = False
    """At a refresh, carry second moments over to the new basis (squares of the overlap) instead of keeping them as
    they are. First moments are always rotated."""

    @property
    def chosen_exact_every(self) -> int:
        return self.exact_every or 1


class DampingConfig(Block):
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


class PreconditionerConfig(Block):
    """The step in the eigenbasis. Of no effect with the optimizer KFACAdamW, whose step is Adam's, but for
    ``precision`` and ``stack_layers``."""

    precision: Literal["highest", "tf32", "mixed"] | None = None
    """Of the products into the eigenbasis and back. highest: fp32, also if the process allows TF32. tf32: TF32, which
    only GPUs have, elsewhere fp32. mixed: TF32 into it, bf16 back and for orthogonalized directions. null: tf32 on GPUs
    that have it, else highest. With method inverse its two products are meant, and mixed is refused."""
    stack_layers: bool | None = None
    """Precondition small layers of equal shape together: fewer and larger launches, for a second copy of their
    eigenvectors, at most 256 MiB a rank, which memory plans do not count. null: on GPUs. Not with method inverse."""
    method: Literal["eigen", "inverse"] = "eigen"
    """eigen: eigenbases of both factors. inverse: their damped inverses by Cholesky, with lambda shared out by pi
    (KAISA): half the products of a step, half the bytes to other workers, refreshes about ten times cheaper, for sides
    of 4096 and up. lambda is that of the last refresh; needs eigenvalues kronecker and exponent 1."""
    eigenvalues: Literal["kronecker", "corrected"] = "kronecker"
    """Of the Fisher in its eigenbasis: products of the factors' (K-FAC), or the running second moment of the rotated
    gradient (EKFAC)."""
    second_moment_decay: float = Field(0.95, ge=0, lt=1)
    """corrected: weight of the past, per step."""
    exponent: float = Field(1.0, gt=0, le=1)
    """The damped eigenvalues are raised to it: 1 is the natural gradient, 0.5 Adam's."""
    graft: Literal["none", "norm"] = "none"
    """norm: the K-FAC direction at the norm of each layer's raw gradient, so that learning rates carry over."""
    kl_clip: NotNegative | None = None
    """Bound kappa on lr^2 <V, gradient> summed over layers; 0 switches it off, null chooses 0.001, and 0 with graft
    "norm"."""
    kl_clip_lr: Literal["current", "peak"] | None = None
    """The lr in that bound. With "current", nu * lr does not depend on lr, which undoes a schedule; "peak" takes the
    largest lr seen, so the step shrinks with it. null: "peak" if DeepSpeed runs an lr scheduler, else "current"."""

    def stacks(self, device: Any) -> bool:
        """Whether layers are stacked on a torch.device."""
        if self.method == "inverse":
            return False
        return device.type != "cpu" if self.stack_layers is None else self.stack_layers

    @property
    def chosen_kl_clip(self) -> Value:
        if self.kl_clip is not None:
            return self.kl_clip
        return Value.constant(0.0 if self.graft == "norm" else 1e-3)

    def kl_clip_at(self, step: int) -> float:
        """0: no clipping at that step."""
        return self.chosen_kl_clip.at(step)


class BurnInConfig(Block):
    """Shorter intervals at the start of a run, where curvature changes fastest."""

    steps: int = Field(50, ge=0)
    """How long they hold; the step after it refreshes everything. 0: no burn-in."""
    update_interval: int = Field(5, ge=1)
    """In place of factor.update_interval, if that is longer."""
    refresh_interval: int | None = Field(None, ge=1)
    """In place of eigenbasis.refresh_interval, if that is longer; a multiple of burn_in.update_interval, null chooses
    twice it."""

    @property
    def chosen(self) -> BurnIn | None:
        if not self.steps:
            return None
        return BurnIn(self.steps, self.update_interval, self.refresh_interval or 2 * self.update_interval)


class AdamConfig(Block):
    """The optimizer KFACAdamW; of no effect with others. Its lr, betas, eps and weight_decay are in the optimizer's
    own block."""

    orthogonalize: bool = True
    """Replace the direction of a layer by its orthogonal factor (Newton-Schulz, as Muon), at a fixed size."""
    except_layers: list[str] = [
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
    """Regexes for the end of a layer's name, from a dot or its beginning on: these keep Adam's direction, as heads do
    with Muon. The default knows the heads of transformers and timm. Norms, embeddings and tied heads do so whatever
    their names."""
    rms: float = Field(0.3, gt=0)
    """Root mean square of an orthogonalized direction's entries: about that of Adam's, so rates carry over."""
    nesterov: bool = True
    """Look one step ahead in the first moment (NAdam)."""


class AdaptiveConfig(Block):
    """SP-NGD's adaptive statistics: a factor that barely changes is captured, reduced and decomposed less often."""

    enabled: bool = False
    """Each factor has an interval of its own, in units of factor.update_interval, which grows 1, 2, 3, 5, 8, .. while
    the factor stays similar to its last two values, and halves when it does not. Starts after the burn-in."""
    tolerance: float = Field(0.1, gt=0)
    """Two values of a factor are similar if they differ by less than this part, in the Frobenius norm."""
    max_interval: int | None = Field(None, ge=1)
    """Longest interval, in units of factor.update_interval; null: no bound."""
