"""Imported once by the server that test ranks are forked from."""

import deepspeed

import ds_kfac  # noqa: F401
import tests.deepspeed.runs
import tests.libraries  # noqa: F401
from ds_kfac.step import proving
from tests.ranks import keep_imports

deepspeed.ops.__compatible_ops__  # noqa: B018  asked for once: it runs compilers
proving.RAISES = True
keep_imports()
