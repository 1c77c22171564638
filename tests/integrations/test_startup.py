"""Zero code: ``DS_KFAC=1`` by ds_kfac.pth, and ``python -m ds_kfac run``; wheel and sdist in an
empty environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from ds_kfac.engine.entry import asked_for
from tests.ranks import ROOT, free_port

ENABLED = "import deepspeed, ds_kfac.engine.entry as entry; print(entry.enabled(), entry.__file__)"
SETS = "import os; os.environ['DS_KFAC'] = '1'\n"
OURS = (
    "import sys; print([name for name in sys.modules if name.split('.')[0] in ('ds_kfac', "
    "'ds_kfac_startup', 'torch')])"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist, and a wheel made of it."""
    pytest.importorskip("setuptools", minversion="77", reason="builds need setuptools 77")
    folder = tmp_path_factory.mktemp("built")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in names.stdout.split():
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    code = "import sys, setuptools.build_meta as build; print(build.build_sdist(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=folder / "tree",
        check=True,
        capture_output=True,
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    source = next((folder / "unpacked").iterdir())
    code = code.replace("build_sdist", "build_wheel")
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="module")
def python(built) -> str:
    """Of an environment with nothing in it but the wheel; torch and deepspeed are those of this
    one."""
    venv.create(built / "venv", with_pip=False, symlinks=True)
    executable = str(built / "venv" / "bin" / "python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run(
        [executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    (Path(site) / "parent.pth").write_text(sysconfig.get_path("purelib"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        executable,
        "install",
        "--no-deps",
        "--no-index",
        "-I",
    ]
    subprocess.run([*pip, str(next(built.glob("*.whl")))], check=True, capture_output=True)
    return executable


def run(python: str, code: str, folder: Path, **variables: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DS_KFAC")}
    result = subprocess.run(
        [python, "-c", code], cwd=folder, env=kept | variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def test_the_wheel_has_all_that_a_run_needs(python, built):
    code = (
        "import ds_kfac, pathlib; p = pathlib.Path(ds_kfac.__file__).parent; "
        "print(len([*p.rglob('csrc/**/*.cu')]), p)"
    )
    sources, where = run(python, code, built).split()
    assert int(sources) == len([*(ROOT / "csrc").rglob("*.cu")]) and Path(where).is_relative_to(
        built
    )
    script = subprocess.run(
        [built / "venv/bin/ds_kfac", "--version"], capture_output=True, text=True, check=True
    )
    assert script.stdout.startswith("ds_kfac ")
    names = [path.name for path in next(built.glob("unpacked/*")).iterdir()]
    assert {"ds_kfac.pth", "ds_kfac_startup.py", "csrc", "setup.py"} <= set(names)
    # what `make quick` needs
    assert {
        "tests",
        "examples",
        "benchmarks",
        "configs",
        "docs",
        "Makefile",
        "constraints.txt",
    } <= set(names)


def test_a_package_index_would_take_both(built):
    pytest.importorskip("twine", reason="needs twine, as `make release` installs it")
    files = [str(path) for path in (*built.glob("*.tar.gz"), *built.glob("*.whl"))]
    assert len(files) == 2 and all("-0.2.0" in name for name in files)
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files],
        check=True,
        capture_output=True,
    )


def test_the_variable_enables_as_soon_as_deepspeed_is_imported(python, built):
    # transformers looks first
    probed = "import importlib.util; assert importlib.util.find_spec('deepspeed')\n"
    enabled, file = run(python, probed + ENABLED, built, DS_KFAC="1").split()
    assert enabled == "True" and Path(file).is_relative_to(built)
    first = "import ds_kfac\n"  # which imports deepspeed
    assert run(python, first + ENABLED, built, DS_KFAC="1").split()[0] == "True"
    assert run(python, ENABLED, built).split()[0] == "False"
    assert run(python, ENABLED, built, DS_KFAC="0").split()[0] == "False"
    wrong = subprocess.run(
        [python, "-c", ENABLED],
        cwd=built,
        env=os.environ | {"DS_KFAC": "maybe", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode and "DS_KFAC: got 'maybe'; must be one of 1, true" in wrong.stderr


def test_a_script_may_set_the_variable_itself(python, built):
    """Before it imports deepspeed; or ds_kfac, which asks at ``deepspeed.initialize``."""
    probed = "import importlib.util; assert importlib.util.find_spec('deepspeed')\n"
    attached = (
        "import sys, deepspeed\nfound = 'ds_kfac' in sys.modules, deepspeed.initialize.__module__\n"
    )
    for code in (SETS, probed + SETS):
        shown = "import ds_kfac.engine.entry as entry; print(*found, entry.enabled())"
        assert run(python, code + attached + shown, built) == "True deepspeed True"
    assert run(python, attached + "print(*found)", built).split()[0] == "False"
    assert run(python, "import ds_kfac\n" + SETS + ENABLED, built).split()[0] == "True"
    assert (
        run(python, "import ds_kfac; ds_kfac.disable()\n" + SETS + ENABLED, built).split()[0]
        == "False"
    )


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


def test_a_process_without_deepspeed_imports_nothing(python, built):
    for word in ("", "1"):
        assert run(python, OURS, built, DS_KFAC=word) == "['ds_kfac_startup']"
    code = (
        "import os, sys, time; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ "
        "!= 'Finder']\n"
        "sys.modules.pop('ds_kfac_startup'); begin = time.perf_counter()\n"
        + (ROOT / "ds_kfac.pth").read_text()
    )
    timed = code + "print(time.perf_counter() - begin)"
    best = min(float(run(python, timed, built)) for _ in range(10))
    finder = (
        code
        + "import timeit; f = sys.meta_path[0]; print(min(timeit.repeat(lambda: f.find_spec('x'), "
        "number=1)))"
    )
    asked = float(run(python, finder, built))
    print(f"the line costs {1e6 * best:.0f} us, a module that is looked for {1e6 * asked:.1f} us")
    assert best < 1e-3 and asked < 1e-4  # seconds, at the start of every Python process


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


def start(python: str, folder: Path, name: str, block: object = None, imports: str = "") -> str:
    """What deepspeed.initialize says on standard error, of ds_kfac, and of its error."""
    code = (
        PLAIN.replace("TYPE", repr(name)).replace("BLOCK", repr(block)).replace("IMPORT", imports)
    )
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DS_KFAC")}
    kept |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "DS_ACCELERATOR": "cpu",
    }
    kept["MASTER_PORT"] = str(free_port())
    run = subprocess.run(
        [python, "-c", code], cwd=folder, env=kept, capture_output=True, text=True, check=False
    )
    lines = [line for line in run.stderr.splitlines() if 'File "' not in line]
    return "\n".join(line for line in lines if "ds_kfac" in line or "Error" in line)


def test_a_block_that_nobody_reads_is_said(python, built):
    text = start(python, built, "SGD", {})
    assert text.startswith(
        'ds_kfac: WARNING: the config has a "kfac" block, which DeepSpeed alone does not read'
    ), text
    assert "python -m ds_kfac run" in text and text.count("\n") == 0
    assert start(python, built, "SGD") == start(python, built, "SGD", {"enabled": False}) == ""
    text = start(python, built, "SGD", {}, "import ds_kfac; ds_kfac.enable()")
    assert "ds_kfac steps 100%" in text and "does not read" not in text
    text = start(python, built, "SGD", {}, "import ds_kfac")
    assert text.count("WARNING") == 1 and "ds_kfac.enable()" in text, (
        "ds_kfac says it in its own words"
    )


@pytest.mark.parametrize("name", ["KFACAdamW", "K-FAC", "KFAC", "kfac", "KFAdamW"])
def test_an_optimizer_that_only_ds_kfac_has_is_an_error_that_names_it(name, python, built):
    text = start(python, built, name)
    assert (
        "AssertionError" in text and "python -m ds_kfac run" in text and "import ds_kfac" in text
    ), text
    assert text.count("ds_kfac: ") == 1 and ('did you mean "KFACAdamW"?' in text) == (
        name != "KFACAdamW"
    )


def test_an_optimizer_that_is_misspelt_is_named_with_ds_kfac_too(python, built):
    text = start(python, built, "K-FAC", None, "import ds_kfac")
    assert text.count('did you mean "KFACAdamW"?') == 1, text
    assert "ds_kfac" not in start(python, built, "Adamm"), "that is none of ours"


@pytest.mark.distributed
def test_the_launcher_enables_in_every_rank(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys\n"
        + ENABLED
        + "\nprint('SHOWN', os.environ['RANK'], __name__, sys.argv, sys.path[0])"
    )
    launcher = [
        "-m",
        "ds_kfac",
        "run",
        "--num_accelerators",
        "2",
        "--master_port",
        str(free_port()),
    ]
    command = [sys.executable, *launcher, str(script), "--words", "two words"]
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300
    )
    shown = sorted(line for line in run.stdout.splitlines() if line.startswith("SHOWN"))
    assert len(shown) == 2, run.stdout + run.stderr
    for rank, line in enumerate(shown):
        argv = [str(script), f"--local_rank={rank}", "--words", "two words"]
        assert line == f"SHOWN {rank} __main__ {argv} {tmp_path}"
    assert run.stdout.count("True /") == 2, "enabled in both"
