# Works on a machine that has Python 3.11+ and make. `make demo` is the place to start.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests run in JOBS processes; those that start Ray in one of them, one after another, and those that start a SuperLink in another.
JOBS ?= 3
PYTEST := python -m pytest -n $(JOBS) --dist loadgroup
export FLWR_TELEMETRY_ENABLED := 0

.PHONY: help demo fast test soak cover check bench format clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all]'
	touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(VENV)/.demo $@

demo: $(VENV)/.demo ## train FedPM on handwritten digits through Flower's simulation engine
	$(BIN)/fedapps run --method fedpm --task digits --clients 10 --alpha 0.1 --rounds 10

fast: $(VENV)/.dev ## run the unit tests, in under a minute
	$(BIN)/$(PYTEST) -m "not engine and not slow and not gpu"

# With CI=true the suite runs against the wheel that .ci/run built, from another folder, so that a file missing in it is noticed.
test: $(VENV)/.dev ## run all tests
ifeq ($(CI),true)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/*.whl
	elsewhere=$$(mktemp -d) && cd $$elsewhere && $(abspath $(BIN))/$(PYTEST) -c $(CURDIR)/pyproject.toml $(CURDIR)/tests; \
	  code=$$?; rm -rf $$elsewhere; exit $$code
else
	$(BIN)/$(PYTEST)
endif

soak: $(VENV)/.dev ## kill runs and lie to them, for an hour or more; not part of the tests
	$(BIN)/python tests/soak/kills.py
	$(BIN)/python tests/soak/replies.py
	$(BIN)/python tests/soak/superlink_kills.py

cover: $(VENV)/.dev ## run all tests, and write which lines they reach into build/coverage
	$(BIN)/$(PYTEST) --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

check: $(VENV)/.dev ## lint, format, types, import direction, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate.py --check

bench: $(VENV)/.dev ## run the benchmarks and write their results
	$(BIN)/python benchmarks/convex_methods.py
	$(BIN)/python benchmarks/engine_equality.py
	$(BIN)/python benchmarks/fedpm_cost.py
	$(BIN)/python benchmarks/fedpm_bytes.py
	$(BIN)/python benchmarks/fedclup_quadratic.py
	$(BIN)/python benchmarks/zeroth_order_cost.py
	$(BIN)/fedapps compare --config configs/digits_comparison.toml --seeds 0,1,2 --lr-grid 0.01,0.03,0.1,0.3,1.0 \
	  --methods fedavg,fedavgm,fedprox,fedadam,localnewton,fedpm --target 0.95

format: $(VENV)/.dev ## format the code and write the generated files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python scripts/generate.py

clean: ## remove what was built and installed here
	rm -rf $(VENV) build dist *.fab .coverage* .mypy_cache .ruff_cache .pytest_cache
