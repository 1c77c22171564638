# make train: the main job. make test: all tests. Both set everything up first.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
RANKS ?= 2
STEPS ?= 300

# The environment's programs first (ninja among them), builds inside it, one thread a rank.
export PATH := $(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR := $(VENV)/torch_extensions
export OMP_NUM_THREADS ?= 1
export PYTHONWARNINGS := ignore::FutureWarning
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'),0)
export DS_ACCELERATOR ?= cpu
endif

LAUNCH = $(BIN)/deepspeed --num_accelerators $(RANKS) examples/train_gpt.py --steps $(STEPS)

.PHONY: setup train compare converge scale gpu test campaign check clean

setup: $(STAMP)

# torch first and pinned: anything that depends on torch would otherwise fetch another build of it
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

train: $(STAMP)
	$(LAUNCH) --deepspeed_config configs/gpt_zero2_kfac.json $(ARGS)

compare: $(STAMP)
	$(LAUNCH) --deepspeed_config configs/gpt_zero2_kfac.json --without-kfac --name adamw --no-plots $(ARGS)
	$(LAUNCH) --deepspeed_config configs/gpt_zero2_kfac.json --name kfac --no-plots $(ARGS)
	$(BIN)/python examples/plots.py runs/adamw runs/kfac --out runs/compare

converge: $(STAMP)
	$(BIN)/python benchmarks/convergence.py --workers $(RANKS) $(ARGS)

scale: $(STAMP)
	$(BIN)/python benchmarks/distributed.py $(ARGS)

gpu: $(STAMP)
	PYTHON=$(BIN)/python bash benchmarks/gpu.sh $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

campaign: $(STAMP)
	$(BIN)/python -m tests.campaign --write docs/reliability.md $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
