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
from tests.examples.runs import one_rank
from tests.programs import python
from tests.ranks import ROOT, free_port

PROBED = "import importlib.util; assert importlib.util.find_spec('deepspeed')\n"
ENABLED = "import deepspeed, ds_kfac.engine.entry as entry; print(entry.enabled(), entry.__file__)"
SETS = "import os; os.environ['DS_KFAC'] = '1'\n"
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


FOUND = "import sys, deepspeed; found = 'ds_kfac' in sys.modules, deepspeed.initialize.__module__\n"
SHOWN = FOUND + "import ds_kfac.engine.entry as entry; print(*found, entry.enabled())"


@pytest.mark.parametrize(
    ("code", "variable", "words"),
    [
        pytest.param(PROBED + ENABLED, "1", ["True"], id="transformers looks first"),
        pytest.param("import ds_kfac\n" + ENABLED, "1", ["True"], id="ds_kfac imports deepspeed"),
        (ENABLED, "", ["False"]),
        (ENABLED, "0", ["False"]),
        # a script sets it before it imports deepspeed; or ds_kfac, which asks at initialize
        (SETS + SHOWN, "", ["True", "deepspeed", "True"]),
        (PROBED + SETS + SHOWN, "", ["True", "deepspeed", "True"]),
        (FOUND + "print(*found)", "", ["False"]),
        ("import ds_kfac\n" + SETS + ENABLED, "", ["True"]),
        ("import ds_kfac; ds_kfac.disable()\n" + SETS + ENABLED, "", ["False"]),
        *((OURS, word, ["['ds_kfac_startup']"]) for word in ("", "1")),
    ],
)
def test_the_variable_enables_as_soon_as_deepspeed_is_imported(installed, code, variable, words):
    """A process without deepspeed imports nothing."""
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


PLAIN = """
import os
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
IMPORT
model = torch.nn.Linear(3, 3)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": TYPE, "params": {"lr": 1e-3}}}
config |= {"kfac": BLOCK} if BLOCK is not None else {}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
"""


def start(run, name: str, block: object = None, imports: str = "") -> str:
    """What deepspeed.initialize says on standard error, of ds_kfac, and of its error."""
    code = PLAIN.replace("TYPE", repr(name)).replace("BLOCK", repr(block))
    done = run("-c", code.replace("IMPORT", imports), status=None, **one_rank())
    lines = [line for line in done.stderr.splitlines() if 'File "' not in line]
    return "\n".join(line for line in lines if "ds_kfac" in line or "Error" in line)


UNREAD = 'WARNING: the config has a "kfac" block, which DeepSpeed alone does not'
NAMED = ("AssertionError", "python -m ds_kfac run", "import ds_kfac")
MEANT = 'did you mean "KFACAdamW"?'
IMPORTED = "import ds_kfac"


@pytest.mark.parametrize(
    ("name", "block", "imports", "told"),
    [
        ("SGD", {}, "", (UNREAD, "python -m ds_kfac run")),
        ("SGD", None, "", ()),
        ("SGD", {"enabled": False}, "", ()),
        ("SGD", {}, f"{IMPORTED}; ds_kfac.enable()", ("ds_kfac updates 100%",)),
        ("SGD", {}, IMPORTED, ("WARNING", "ds_kfac.enable()")),
        ("KFACAdamW", None, "", NAMED),
        ("K-FAC", None, "", (*NAMED, MEANT)),
        ("K-FAC", None, IMPORTED, (MEANT,)),
        ("Adamm", None, "", ("AssertionError",)),
    ],
)
def test_what_deepspeed_alone_does_not_read_or_know_is_said_once(
    installed, name, block, imports, told
):
    """As a block that nobody reads, or an optimizer that only ds_kfac has. With ds_kfac imported it
    is said in its own words."""
    text = start(installed, name, block, imports)
    assert all(part in text for part in told) and bool(text) == bool(told), text
    assert text.count("WARNING") == any("WARNING" in part for part in told), text
    assert text.count(MEANT) == (MEANT in told) and (UNREAD in text) == (UNREAD in told), text
    assert name != "Adamm" or "ds_kfac" not in text, "that is none of ours"


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
