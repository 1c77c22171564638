"""What a machine has of what the benchmarks need: each thing by itself, so that one that is missing
hides no other."""

import importlib
import subprocess

PACKAGES = (
    "torch",
    "triton",
    "pytest",
    "numpy",
    "matplotlib",
    "PIL",
    "ninja",
    "pydantic",
    "hjson",
    "deepspeed",
)
COMMANDS = (
    "nvidia-smi",
    "nvcc --version",
    "compute-sanitizer --version",
    "git describe --always --dirty",
    "nproc",
)


def main() -> None:
    for name in PACKAGES:
        try:
            module = importlib.import_module(name)
            print(name, getattr(module, "__version__", "there"), flush=True)
        except Exception as problem:
            print(name, f"MISSING: {type(problem).__name__}: {problem}", flush=True)
    for command in COMMANDS:
        try:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
            print(f"$ {command}\n{done.stdout}{done.stderr}", flush=True)
        except (OSError, subprocess.TimeoutExpired) as problem:
            print(f"$ {command}\nMISSING: {problem}", flush=True)


if __name__ == "__main__":
    main()
