"""Zero code: ``DS_KFAC=1`` by ds_kfac.pth, and ``python -m ds_kfac run``; wheel and sdist in an
empty environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from functools import partial
from pathlib import Path

import pytest

from ds_kfac.engine.entry import asked_for
from tests.programs import python
from tests.ranks import ROOT, free_port

# transformers looks for deepspeed first; the script sets the variable afterwards
LATE = """import importlib.util, os, sys
assert importlib.util.find_spec('deepspeed')
os.environ['DS_KFAC'] = '1'
import deepspeed
print('ds_kfac' in sys.modules)
"""
ENABLED = "import deepspeed, ds_kfac.engine.entry as entry; print(entry.enabled(), entry.__file__)"
OURS = (
    "import sys; print([name for name in sys.modules if name.split('.')[0] in ('ds_kfac', "
    "'ds_kfac_startup', 'torch')])"
)
BUILD = "import sys, setuptools.build_meta as build; print(build.build_{}(sys.argv[1]))"
NEEDED = {"ds_kfac.pth", "ds_kfac_startup.py", "csrc", "setup.py", "tests", "examples"}
NEEDED |= {"benchmarks", "configs", "docs", "Makefile", "constraints.txt"}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist, and a wheel made of it."""
    pytest.importorskip("setuptools", minversion="77", reason="builds need setuptools 77")
    folder = tmp_path_factory.mktemp("built")
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    for name in names.split():
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    python("-c", BUILD.format("sdist"), str(folder), folder=folder / "tree")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    source = next((folder / "unpacked").iterdir())
    python("-c", BUILD.format("wheel"), str(folder), folder=source)
    return folder


@pytest.fixture(scope="module")
def installed(built):
    """Python of an environment with nothing in it but the wheel; torch and deepspeed are those of
    this one."""
    venv.create(built / "venv", with_pip=False, symlinks=True)
    executable = str(built / "venv" / "bin" / "python")
    run = partial(python, executable=executable, folder=built)
    site = run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    (Path(site) / "parent.pth").write_text(sysconfig.get_path("purelib"))
    pip = ["-m", "pip", "--python", executable, "install", "--no-deps", "--no-index", "-I"]
    python(*pip, str(next(built.glob("*.whl"))), folder=built)
    return run


def printed(run, code: str, **variables: str) -> list[str]:
    """The words of the last line."""
    return run("-c", code, **variables).stdout.strip().splitlines()[-1].split()


def test_wheel_and_sdist_have_all_that_is_needed(installed, built):
    code = (
        "import ds_kfac, pathlib; p = pathlib.Path(ds_kfac.__file__).parent; "
        "print(len([*p.rglob('csrc/**/*.cu')]), p)"
    )
    sources, where = printed(installed, code)
    assert int(sources) == len([*(ROOT / "csrc").rglob("*.cu")])
    assert Path(where).is_relative_to(built)
    assert installed(str(built / "venv/bin/ds_kfac"), "--version").stdout.startswith("ds_kfac ")
    names = {path.name for path in next(built.glob("unpacked/*")).iterdir()}
    assert names >= NEEDED


@pytest.mark.parametrize(
    ("code", "variable", "words"),
    [
        pytest.param("import ds_kfac\n" + ENABLED, "1", ["True"], id="ds_kfac imports deepspeed"),
        pytest.param(LATE, "", ["True"], id="transformers looks first"),
        pytest.param(OURS, "1", ["['ds_kfac_startup']"], id="a process without deepspeed"),
    ],
)
def test_the_variable_enables_as_soon_as_deepspeed_is_imported(installed, code, variable, words):
    assert printed(installed, code, DS_KFAC=variable)[: len(words)] == words


def test_finders_that_ask_each_other_come_to_an_end(monkeypatch):
    import ds_kfac_startup

    class Asking(ds_kfac_startup.Finder):
        """Another tool's."""

    finders = [Asking(), ds_kfac_startup.Finder()]
    monkeypatch.setattr(sys, "meta_path", [*finders, *sys.meta_path])
    for finder in finders:
        assert finder.find_spec("deepspeed").name == "deepspeed" and not finder.asking


def test_words_of_the_variable():
    assert not any(map(asked_for, ("0", "", "false", "No", "no", "OFF", " off", "FALSE ")))
    assert all(map(asked_for, ("1", "true", "YES", "on", " On")))
    for wrong in ("maybe", "2", "n"):
        with pytest.raises(ValueError, match=r"DS_KFAC: got '.*'; must be one of 1, true"):
            asked_for(wrong)


@pytest.mark.distributed
def test_the_launcher_enables_in_every_rank(tmp_path):
    script = tmp_path / "show.py"
    shown = "print('SHOWN', os.environ['RANK'], __name__, sys.argv, sys.path[0])"
    script.write_text(f"import os, sys\n{ENABLED}\n{shown}")
    launcher = ["--num_accelerators", "2", "--master_port", str(free_port())]
    command = ["-m", "ds_kfac", "run", *launcher, str(script), "--words", "two words"]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = python(*command, folder=ROOT, path=path)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("SHOWN"))
    arguments = [[str(script), f"--local_rank={rank}", "--words", "two words"] for rank in range(2)]
    assert lines == [
        f"SHOWN {rank} __main__ {argv} {tmp_path}" for rank, argv in enumerate(arguments)
    ], done.stdout + done.stderr
    assert done.stdout.count("True /") == 2, "enabled in both"
