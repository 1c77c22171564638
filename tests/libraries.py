"""torch and deepspeed as an engine needs them, nothing of ours: imported once by processes that
fork others."""

import warnings

warnings.simplefilter("ignore", FutureWarning)

import deepspeed  # noqa: E402

# what DeepSpeed imports for its first engine, torch._inductor among it: 600 modules, else 2 seconds
# of every rank
import deepspeed.module_inject.auto_ep_layer  # noqa: E402
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: E402
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
import torch  # noqa: E402, F401
