# make train, make train-images: the main jobs. make quick: unit tests. make test: all tests of ds_kfac. make
# test-benchmarks: those of benchmarks. make integrations: with the frameworks. make docs: the site. All set
# everything up first.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
RANKS ?= 2
STEPS ?= 300
CALLS ?= modes step lm kernels
WORKERS ?= 2

# The environment's programs first (ninja among them), builds inside it, one thread a rank.
export PATH := $(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR := $(VENV)/torch_extensions
export OMP_NUM_THREADS ?= 1
export PYTHONWARNINGS := ignore::FutureWarning
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'),0)
export DS_ACCELERATOR ?= cpu
# images of one's own on a CPU: as many as it can do, 512 a step; ARGS come after and count
OWN_IMAGES = $(if $(findstring --data,$(ARGS)),--model resnet8 --images 20000 --rows $(shell expr 512 / $(RANKS)))
endif

LAUNCHER = $(BIN)/deepspeed --num_accelerators $(RANKS)
# a file's tests share results, so they stay with one worker
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20
LAUNCH = $(LAUNCHER) examples/train_gpt.py --steps $(STEPS)

.PHONY: setup train train-moe train-images compare converge scale gpu test test-benchmarks quick processors mutants integrations integrations-more versions versions-short campaign report check docs test-site release clean

setup: $(STAMP)

# torch first and pinned: anything that depends on torch would otherwise fetch another build of it
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

train: $(STAMP)
	$(LAUNCH) --deepspeed_config configs/gpt_zero2_kfac.json $(ARGS)

# a GPT of 8 experts a block, stacked in one tensor, by KFACAdamW, AdamW and Muon; all in one plot. DeepSpeed's Muon would
# be compiled for two minutes.
MOE = --experts 8 --blocks 3 --no-plots
train-moe: $(STAMP)
	$(LAUNCH) --deepspeed_config configs/gpt_zero2_kfac.json --name moe $(MOE) $(ARGS)
	$(LAUNCH) --deepspeed_config configs/gpt_zero2_kfac.json --without-kfac --name moe-adamw $(MOE) $(ARGS)
	TORCH_COMPILE_DISABLE=1 $(LAUNCH) --deepspeed_config configs/gpt_zero2_muon.json --name moe-muon $(MOE) $(ARGS)
	$(BIN)/python examples/plots.py runs/moe-adamw runs/moe-muon runs/moe --out runs/moe-compare

train-images: $(STAMP)
	$(LAUNCHER) examples/train_images.py --steps $(STEPS) --deepspeed_config configs/images_zero2_kfac.json $(OWN_IMAGES) $(ARGS)

compare: $(STAMP)
	$(LAUNCH) --deepspeed_config configs/gpt_zero2_kfac.json --without-kfac --name adamw --no-plots $(ARGS)
	$(LAUNCH) --deepspeed_config configs/gpt_zero2_kfac.json --name kfac --no-plots $(ARGS)
	$(BIN)/python examples/plots.py runs/adamw runs/kfac --out runs/compare

converge: $(STAMP)
	$(BIN)/python -m benchmarks.convergence --workers $(RANKS) $(ARGS)

scale: $(STAMP)
	$(BIN)/python -m benchmarks.distributed $(ARGS)

gpu: $(STAMP)
	for call in $(CALLS); do PYTHON=$(BIN)/python bash benchmarks/gpu.sh $$call || failed=1; done; exit $$failed

# tests of what lies around the package: a target of their own
AROUND = tests/benchmarks tests/test_processors.py
test: $(STAMP)
	$(PYTEST) $(AROUND:%=--ignore=%) --ignore=tests/campaign $(ARGS)

test-benchmarks: $(STAMP)
	$(PYTEST) $(AROUND) $(ARGS)

QUICK = -m "not distributed" --ignore-glob='tests/ops/test_cuda*' --ignore-glob='tests/ops/test_triton*' \
	$(AROUND:%=--ignore=%) --ignore=tests/gpu --ignore=tests/examples --ignore=tests/campaign --ignore=tests/integrations

quick: $(STAMP)
	$(PYTEST) $(QUICK) $(ARGS)

# the same sums in other orders, as other processors take them
processors: $(STAMP)
	$(BIN)/python -m tests.processors $(ARGS) -- $(QUICK)
	$(BIN)/python -m tests.processors $(ARGS) -- tests/deepspeed/test_features.py tests/deepspeed/test_modes.py

# mutmut 3.8 fails with pytest 9.2, so both are installed beside the environment, in a folder that only this target reads.
MUTMUT = $(VENV)/mutmut
MUTATE = cd $(VENV)/mutants && PYTHONPATH=$(MUTMUT) DS_ACCELERATOR=cpu $(BIN)/python -m mutmut
SURVIVORS = $(MUTATE) results | sed -nE "s/^ *(.*): (survived|no tests)$$/\1/p"
$(MUTMUT)/.ready: $(STAMP)
	$(BIN)/python -m pip install --quiet --target $(MUTMUT) mutmut==3.8.0 "pytest<9.2"
	touch $@

# one small change of FOLDER after the other, in a copy below .venv: prints those that TESTS do not notice
mutants: $(MUTMUT)/.ready
	test -d "$(FOLDER)" && test -e "$(TESTS)" || { echo "make mutants FOLDER=ds_kfac/schedule TESTS=tests/schedule"; exit 2; }
	rm -rf $(VENV)/mutants && mkdir $(VENV)/mutants
	ln -s $(CURDIR)/ds_kfac $(CURDIR)/tests $(CURDIR)/docs $(CURDIR)/csrc $(CURDIR)/pyproject.toml $(VENV)/mutants
	sed 's|FOLDER|$(FOLDER)|; s|TESTS|$(TESTS)|' tests/mutmut.cfg > $(VENV)/mutants/setup.cfg
	$(MUTATE) run --max-children $(WORKERS) $(ARGS) < /dev/null
	for name in $$($(SURVIVORS)); do ($(MUTATE) show $$name); done

# transformers, TRL, PEFT, Accelerate and Lightning, in an environment of their own: they bring what ours should not have.
# Where one of them does not install, its tests say so and are skipped.
$(VENV)/integrations/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)/integrations
	$(VENV)/integrations/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)/integrations/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[examples]" pytest \
		jsonschema
	$(VENV)/integrations/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[integrations]" \
		|| echo "integrations: not all packages install here, see above; their tests are skipped"
# without what it asks for: its torchvision brings another torch
	$(VENV)/integrations/bin/python -m pip install --quiet --no-deps kronfluence einconv opt_einsum \
		|| echo "integrations: kronfluence does not install here; its test is skipped"
	touch $@

integrations: $(VENV)/integrations/.ready
	$(VENV)/integrations/bin/python -m pytest -rs tests/integrations/test_packages.py tests/integrations/test_trainer.py \
		tests/integrations/test_factor_tools.py tests/integrations/test_grpo.py \
		tests/integrations/test_openrlhf.py \
		tests/integrations/test_axolotl.py tests/integrations/test_coverage.py tests/integrations/test_blocks.py \
		tests/estimate/test_check.py tests/examples/test_factors.py $(ARGS)

# LLaMA-Factory and ms-swift, each in an environment of its own: they want other versions of what they share. DeepSpeed
# is the one that they recommend, for LLaMA-Factory (0.16.4) the oldest that ds_kfac takes.
MORE = llamafactory ms-swift
DEEPSPEED_llamafactory = 0.17.0
DEEPSPEED_ms-swift = 0.18.9
$(VENV)/more/%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[examples]" pytest datasets
	$(@D)/bin/python -m pip install --quiet $* "torch==$$($(@D)/bin/python -c 'import torch; print(torch.__version__)')" \
		|| echo "integrations-more: $* does not install here, see above; its tests are skipped"
	DS_BUILD_OPS=0 $(@D)/bin/python -m pip install --quiet --no-deps deepspeed==$(DEEPSPEED_$*)
# those that were built for another torch break what imports them; nothing here sees or hears
	for one in torchvision torchaudio; do $(@D)/bin/python -c "import $$one" 2>/dev/null \
		|| $(@D)/bin/python -m pip uninstall --quiet --yes $$one; done
	touch $@

integrations-more: $(MORE:%=$(VENV)/more/%/.ready)
	for tool in $(MORE); do $(VENV)/more/$$tool/bin/python -m pytest -rs tests/integrations/test_more.py $(ARGS) || failed=1; \
		done; exit $$failed

# every tested DeepSpeed, installed below .venv/deepspeed; versions-short: the oldest and the newest, a few modes
versions: $(STAMP) $(VENV)/integrations/.ready
	$(BIN)/python -m tests.versions $(ARGS)

versions-short: $(STAMP)
	$(BIN)/python -m tests.versions --short

# in an environment without torch: the API's pages are made from the sources
DOCS = $(VENV)/docs
$(DOCS)/.ready: docs/requirements.txt constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt --requirement $< && touch $@ \
		|| echo "docs: mkdocs-material does not install here, see above; the site is not built"

docs: $(DOCS)/.ready
	if [ -f $< ]; then NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict; fi

# the site's links, and its pages in a Chromium of the machine: width, search, navigation
test-site: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement docs/requirements.txt
	$(BIN)/python -m pip install --quiet playwright || echo "test-site: playwright does not install here; no browser is asked"
	$(BIN)/python -m pytest -rs tests/test_site.py $(ARGS)

# what a package index would get, below dist/
release: $(STAMP)
	$(BIN)/python -m pip install --quiet build twine
	rm -rf dist && $(BIN)/python -m build && $(BIN)/twine check --strict dist/*

campaign: $(STAMP)
	$(BIN)/python -m pytest -s tests/campaign $(ARGS)

# lines, widths, words, functions and operations of a step, beside those of the last commit
report: $(STAMP)
	$(BIN)/python -m tests.sizes $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/cuda/* tests/ops/emulation.h
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
