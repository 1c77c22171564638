"""Imported once by the server that the benchmark's ranks are forked from."""

import warnings

warnings.simplefilter("ignore", FutureWarning)

import deepspeed  # noqa: E402, F401
import torch  # noqa: E402, F401

import ds_kfac  # noqa: E402, F401
