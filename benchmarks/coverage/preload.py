"""Imported once by the server that the models' processes are forked from: nearly all of what a tiny
run costs is imports."""

import benchmarks.distributed.preload
from benchmarks.coverage.architectures import with_torchvision

with_torchvision()

import deepspeed.module_inject.auto_ep_layer  # noqa: E402
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401  # compiles, and imports inductor for it
import timm  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401

import benchmarks.coverage.batches  # noqa: E402
import benchmarks.coverage.measure  # noqa: E402, F401
