"""The blocks inside ``"kfac"`` on where, when and with which code it is computed. Docstrings are their manual."""

from typing import Any, Literal

from pydantic import Field

from ds_kfac.config_blocks import Block
from ds_kfac.config_values import Costs


class LayersConfig(Block):
    """Which layers; Python regexes searched in module names."""

    include: list[str] = []
    """If any are given, only modules matching one of them."""
    exclude: list[str] = []
    """Modules matching one of them are left to the optimizer alone."""
    types: list[Literal["Linear", "Conv1D", "Embedding", "LayerNorm", "RMSNorm", "Tied"]] | None = None
    """Layer types to precondition; Tied is an embedding and a head with one weight. null chooses Linear and Conv1D."""
    share_inputs: bool = True
    """Keep one A for layers that see the same input (separate q, k and v; gate and up). They are found in the first
    step, and every later one is checked."""
    max_outputs: int | None = Field(None, ge=1)
    """Most outputs of a layer: a Linear with more is cut into blocks of rows, each with a G of its own, so that several
    ranks share the work of one large layer (more ranks than layers). G is then block-diagonal, and grafting and
    orthogonalization are per block. null: layers stay whole."""


class AssignmentConfig(Block):
    """Who does what."""

    gradient_worker_fraction: float | None = Field(None, gt=0, le=1)
    """Part of the ranks that hold a layer's eigenbases and precondition its gradient (KAISA), where gradients are
    replicated (stage 0): 1/world is MEM-OPT, 1 is COMM-OPT. null chooses the fastest by prediction that respects
    memory_budget_gb. Under ZeRO 1-3 gradients are partitioned and there is always one worker."""
    memory_budget_gb: float | None = Field(None, gt=0)
    """K-FAC state a rank may hold (factors, eigenbases, moments), in 10^9 bytes; null: no limit."""
    split_factors: bool | None = None
    """Let two ranks decompose a layer's A and G. null: if it is predicted to be faster and eigenbases travel anyway,
    which they do with several gradient workers."""
    costs: Costs = "builtin"
    """Seconds of decompositions, products and messages that plans are made from: builtin figures, measured once on
    this machine and kept in ~/.cache/ds_kfac, or given."""
    load_tolerance: float = Field(0.1, ge=0)
    """A layer stays where most of its gradient is unless that rank's load passes the mean by this part."""
    kfac_first: bool = False
    """Lay parameter groups out as [preconditioned | rest], so that fewer layers straddle ranks under ZeRO-1/2.
    Changes DeepSpeed's checkpoint layout: use it from the first step of a run, or not at all."""


class CommunicationConfig(Block):
    """What travels, and when."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Of batch sums and eigenvectors on the wire; inverses travel in fp32. Sums are added up in fp32 in any case. null:
    bf16 if the model is in 16 bits and the traffic is predicted to cost over 2 % of a step's K-FAC work, else fp32."""
    gradient_dtype: Literal["fp32", "bf16"] | None = None
    """Of gradients to their workers and preconditioned gradients back (fp16 would overflow: they carry the loss scale).
    null: as they are stored to the workers, fp32 back."""
    error_feedback: bool = False
    """With 16 bits: add what rounding took from a batch sum to the next one. Costs 2 bytes per packed element on every
    rank."""
    overlap: bool = True
    """Send batch sums during backward, as soon as half of the layers have theirs."""


class OffloadConfig(Block):
    """Where K-FAC state lies between steps."""

    device: Literal["none", "cpu"] = "none"
    """cpu: running factors and their history are kept in (pinned) host memory; eigenbases and moments, which every
    step needs, stay on the device."""


class CheckpointConfig(Block):
    """What is saved beside DeepSpeed's files."""

    eigenbasis: bool = True
    """Save eigenbases, or inverses: resuming continues exactly. false saves two thirds (half) of the space and
    decomposes on loading."""
    on_missing: Literal["error", "fresh"] = "error"
    """What load_checkpoint does if the K-FAC state of a checkpoint that had one is missing, damaged or of another
    model. error: raise, on every rank. fresh: warn and start K-FAC afresh. In either case DeepSpeed has loaded weights
    and optimizer before."""


class MetricsConfig(Block):
    """What is measured."""

    timings: bool = False
    """Time every stage of the K-FAC step (synchronises the device); see ``engine.kfac.metrics.seconds``."""


class OpsConfig(Block):
    """Which code computes."""

    backend: Literal["cpp", "triton", "cuda", "torch"] | None = None
    """cpp: C++ on the CPU. triton, cuda: on NVIDIA GPUs from compute capability 8.0, each with some of the operations.
    torch: plain torch, anywhere. What a backend has no code for runs in torch. null: the best that can run here, per
    operation; the attach report tells. All but torch are compiled at first use. Of the process: the last attach
    decides."""


class PaddingConfig(Block):
    """Which rows of a batch count, read from the arguments of the model's forward; ``engine.kfac.read_batch`` takes a
    function of your own."""

    count: Literal["labelled", "attended", "all"] = "labelled"
    """labelled: rows that the mask attends and whose own label has a loss. attended: those of the mask. The number of
    loss terms is that of the labels in any case."""
    mask: str | None = None
    """Argument with a [batch, tokens] mask, 0 for padding; null: "attention_mask", if there is one."""
    labels: str | None = None
    """Argument with integer labels; null: "labels", if there is one."""
    ignore_index: int = -100
    """The label without a loss."""
    shifted: bool | None = None
    """Whether a token is trained on the next one's label; null: if the model's class is a ...ForCausalLM or
    ...LMHeadModel."""

    @property
    def arguments(self) -> dict[str, Any]:
        return self.model_dump()
