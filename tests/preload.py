"""Imported once by the server that test ranks are forked from."""

import gc

import ds_kfac  # noqa: F401
import tests.deepspeed.runs
import tests.libraries  # noqa: F401

gc.collect()
gc.freeze()  # DeepSpeed collects garbage all the time, each time going through a million objects of what was imported
