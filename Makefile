# Every target sets up what it needs: `make run` and `make test` each work in a fresh clone.
#
#   make run     the main job: in the emulator without a GPU, on virtual ranks with one, one process per GPU with several
#   make test    the test suite            ARGS="-k name" passes arguments on
#   make lint    ruff and mypy
#   make docs    checks the documentation: links, Python blocks, printed output
#   make bench   how long the emulator takes for a schedule; with a GPU, ops beside their rivals   ARGS=--quick
#   make clean   removes everything that make made

# Pytest workers; the suite is written for two.
JOBS ?= 2
ARGS ?=
BIN := .venv/bin
# The oldest supported Triton, beside the environment's own, for the tests that compile every kernel with both.
OLD_TRITON := .cache/triton-3.6.0
INPUTS := pyproject.toml constraints-cpu.txt scripts/setup.sh

# An environment holds paths: in a clone that was moved it does not start, in a copy it would run the original's code.
# The setup script writes down where it made one, and makes it anew elsewhere.
ifneq "$(shell cat .venv/.place 2>/dev/null)" "$(CURDIR)"
.venv/.run-ready .venv/.dev-ready: elsewhere
endif

.PHONY: run test lint docs bench clean elsewhere

elsewhere:

run: .venv/.run-ready
	$(BIN)/tileweave run matmul_reduce_scatter $(ARGS)

test: .venv/.dev-ready $(OLD_TRITON)/.ready
	TILEWEAVE_OLD_TRITON=$(abspath $(OLD_TRITON)) $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: .venv/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.dev-ready
	$(BIN)/python -m pytest tests/test_docs.py $(ARGS)

bench: .venv/.dev-ready
	$(BIN)/python -m tileweave.bench.emulator
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/tileweave bench $(ARGS); fi

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.run-ready: $(INPUTS)
	scripts/setup.sh run

.venv/.dev-ready: $(INPUTS)
	scripts/setup.sh dev

$(OLD_TRITON)/.ready: | .venv/.dev-ready
	scripts/old_triton.sh $(OLD_TRITON)
