"""What importing costs: commands about keys know neither torch nor DeepSpeed, and ds_kfac adds
little to DeepSpeed.

Times are compared with importing DeepSpeed in the same run: machines differ by a factor of two and
more."""

import os
import re
import resource
import subprocess
import sys
import tempfile
from typing import get_args

import pytest

from ds_kfac import __all__ as names
from ds_kfac.config.keys import PreconditionerConfig
from ds_kfac.curvature.methods import METHODS
from tests.ranks import ROOT

CACHE = tempfile.TemporaryDirectory()
"""Of bytecode, which the environment may keep Python from writing beside the sources."""
HEAVY = {"torch", "deepspeed", "numpy", "transformers", "matplotlib"}


def cpu_seconds(*arguments: str) -> tuple[float, subprocess.CompletedProcess]:
    """Of a process and what it starts, whatever else the machine does."""
    env = os.environ | {"PYTHONPYCACHEPREFIX": CACHE.name, "PYTHONDONTWRITEBYTECODE": ""}
    command, used = [sys.executable, *arguments], resource.RUSAGE_CHILDREN
    before = sum(resource.getrusage(used)[:2])
    options = {"capture_output": True, "text": True, "timeout": 300, "check": True}
    run = subprocess.run(command, cwd=ROOT, env=env, **options)
    return sum(resource.getrusage(used)[:2]) - before, run


def seconds_to(*command: str) -> float:
    """The best of two runs, of which the first may write bytecode."""
    return min(cpu_seconds(*command)[0] for _ in range(2))


@pytest.fixture(scope="module")
def deepspeeds() -> float:
    return seconds_to("-c", "import deepspeed")


@pytest.mark.parametrize("command", ["--help", "--version", "schema", "config", "plot --help"])
def test_commands_about_keys_import_nothing_heavy(command, deepspeeds):
    _, run = cpu_seconds("-X", "importtime", "-m", "ds_kfac", *command.split())
    imported = set(re.findall(r"\| +(\w+)$", run.stderr, re.MULTILINE))
    assert "ds_kfac" in imported and not imported & HEAVY, imported & HEAVY
    assert run.stdout
    assert seconds_to("-m", "ds_kfac", *command.split()) < 0.33 * deepspeeds


def test_the_import_takes_at_most_a_third_more_than_deepspeeds(deepspeeds):
    assert seconds_to("-c", "import ds_kfac") < 1.33 * deepspeeds
    _, run = cpu_seconds("-X", "importtime", "-c", "import ds_kfac")
    for slow in ("torch._dynamo", "setuptools"):  # more than a second, and a quarter of one
        assert f" {slow}\n" not in run.stderr, slow


def test_a_commands_model_may_use_all_of_ds_kfac():
    """There it is imported when it is asked for."""
    code = (
        "import sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-mds_kfac']\n"
        "import ds_kfac; assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules\n"
        f"print([getattr(ds_kfac, name) is not None for name in {names!r}].count(True))\n"
        "import deepspeed; assert deepspeed.initialize.__wrapped__\n"
        "try: ds_kfac.nothing\n"
        "except AttributeError as error: print(error)"
    )
    _, run = cpu_seconds("-c", code)
    error = "module 'ds_kfac' has no attribute 'nothing'"
    assert run.stdout.splitlines()[-2:] == [str(len(names)), error]


def test_the_names_of_methods_are_those_of_the_table():
    """The config knows them without torch."""
    field = PreconditionerConfig.model_fields["method"]
    assert get_args(field.annotation) == tuple(METHODS)
