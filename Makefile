VENV ?= .venv
PYTHON ?= python3
# Build of torch, installed first so that no other package selects one.
TORCH ?= torch==2.13.0

# Modules are compiled when they are first imported; pip would compile all of them, which takes a minute.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo unit test test-gpu check docs release-check faults load install clean

# A miniature learns to spell; RapidOCR reads its words. About a minute on two idle cores, after installation.
demo: $(VENV)/.installed-ocr
	$(VENV)/bin/solrl-train demo

# The product's tests. `TESTS=benchmarks/tests` are those of the figures, `TESTS=` all.
TESTS ?= tests

# No Redis, no browser, no service: two minutes.
unit: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --unit $(TESTS)

# Three processes on two cores, because tests often wait for processes to start or end.
test: $(VENV)/.installed-dev
	scripts/install-test-tools
	$(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

# What needs a GPU, on a machine with one.
test-gpu: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -n 14 --gpu benchmarks/results/gpu_tests.json; rc=$$?; $(VENV)/bin/python benchmarks/evidence; exit $$rc

check: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The documentation site, into runs/site.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# .ci/run and checks that take hours: full counts of the fault rows, the wheel in a clean environment.
release-check:
	scripts/release-check

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-ocr: $(VENV)/.installed
	$(PIP) --editable '.[ocr]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-ocr
	$(PIP) --editable '.[dev]'
	# In separate folders: diffusers imports torchao if it is installed, and tests also run with the oldest diffusers.
	$(PIP) --no-deps --upgrade --target $(VENV)/cross-checks torchao
	$(PIP) --no-deps --upgrade --target $(VENV)/oldest diffusers==0.38.0
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@

# Also `python benchmarks/faults.py --only ROW --trials N`.
faults: $(VENV)/.installed-dev
	scripts/install-test-tools
	$(VENV)/bin/python benchmarks/faults.py

load: $(VENV)/.installed-dev
	$(VENV)/bin/python benchmarks/load

clean:
	rm -rf $(VENV) runs
