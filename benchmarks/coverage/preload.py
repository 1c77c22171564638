"""Imported once by the server that the models' processes are forked from."""

import benchmarks.distributed.preload  # noqa: F401
from benchmarks.coverage.architectures import with_torchvision

with_torchvision()

import transformers.modeling_utils  # noqa: E402, F401
