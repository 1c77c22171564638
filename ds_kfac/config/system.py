"""The blocks inside ``"kfac"`` on where, when and with which code it is computed. Docstrings are their manual."""

from typing import Literal

from pydantic import Field

from ds_kfac.config.method import Block
from ds_kfac.config.values import Pattern


class LayersConfig(Block):
    """Which layers; Python regexes searched in module names."""

    include: list[Pattern] = []
    """If not empty: precondition only modules that match one of these."""
    exclude: list[Pattern] = []
    """Leave modules that match one of these to the optimizer alone."""
    types: (
        list[
            Literal[
                "Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d",
                "ConvTranspose3d", "LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm",
            ]
        ]
        | None
    ) = None  # fmt: skip
    """Layer types to precondition. Conv1D is the linear layer of transformers' GPT-2, Conv1d torch's convolution.
    null: Linear, Conv1D and all convolutions."""


class AssignmentConfig(Block):
    """Who does what."""

    gradient_worker_fraction: float | None = Field(None, gt=0, le=1)
    """Fraction of the ranks that hold a layer's eigenbases and precondition its gradient (KAISA), where gradients are
    replicated (stage 0): 1/world is MEM-OPT, 1 is COMM-OPT. null: the fastest predicted fraction within
    memory_budget_gb. Under ZeRO 1-3 gradients are partitioned and a layer always has one worker."""
    memory_budget_gb: float | None = Field(None, gt=0)
    """Most memory of K-FAC per rank, in 10^9 bytes: state (factors, eigenbases, moments), and batch sums, gradients and
    results while a step lasts; without messages, of 256 MiB at most. null: no limit."""
    costs: str | None = None
    """File with seconds of decompositions and products of this machine, which ``python -m benchmarks.kernels.costs``
    writes; plans are then made from them. null: builtin ones."""


class CommunicationConfig(Block):
    """What travels, and in which dtype."""

    dtype: Literal["fp32", "bf16"] | None = None
    """dtype in which batch sums and eigenvectors travel; sums are added in fp32, inverses travel in fp32. null: bf16 if
    the model is in 16 bits and the traffic is predicted to cost over 2 % of a step's K-FAC work, else fp32."""


class OffloadConfig(Block):
    """Where K-FAC state lies between steps."""

    device: Literal["none", "cpu"] = "none"
    """cpu: keep running factors and their history in (pinned) host memory. Eigenbases and moments stay on the device,
    because every step needs them."""


class CheckpointConfig(Block):
    """What is saved in addition to DeepSpeed's files."""

    eigenbasis: bool = True
    """true: save eigenbases or inverses, so that resuming is exact. false: save two thirds of the space (half with
    inverses) and decompose on loading."""
    on_missing: Literal["error", "fresh"] = "error"
    """What load_checkpoint does if the K-FAC state that a checkpoint names is missing, damaged or of another model.
    error: raise on every rank. fresh: warn and start K-FAC afresh. DeepSpeed has loaded weights and optimizer before,
    in both cases. A checkpoint written without K-FAC always starts K-FAC afresh, with a warning."""


class OpsConfig(Block):
    """Which code computes."""

    backend: Literal["triton", "cuda", "torch"] | None = None
    """Implementation of the operations. triton, cuda: on NVIDIA GPUs from compute capability 8.0, each for some
    operations. torch: plain torch, anywhere. An operation that a backend does not have runs in torch.
    null: the best backend that runs here, per operation; the attach report lists them. All except torch are compiled at
    first use. The choice holds for the process: the last attach decides."""


class PaddingConfig(Block):
    """Which rows of a batch count, read from the arguments of the model's forward by Hugging Face's names;
    ``engine.kfac.read_batch`` takes a function of your own for any others."""

    count: Literal["labelled", "attended", "all"] = "labelled"
    """Rows that count. labelled: rows inside the mask whose own label has a loss. attended: rows inside the mask. all:
    every row. Rows of an encoder that has a decoder are those of its mask in both. The number of loss terms is that of
    the labels in any case."""
