# make demo      the whole service once, on this machine
# make test      lint, types, import rules, the dashboard's checks and the quick tests
# make test-all  the slow tests too
# make dashboard  build the dashboard into dashboard/dist, where something has changed
# make chaos     ten minutes of random faults at the whole service: SEED=1 DURATION=600 JOBS=50
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two threads of torch per test process would fight over two cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# For two cores: one of the three processes mostly waits (tests/spread.py).
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q -n 3 --dist loadfile --durations=40 --durations-min=5

SEED ?= 1
DURATION ?= 600
JOBS ?= 50

DASHBOARD_BUILT := dashboard/dist/.built
DASHBOARD_CHECKED := dashboard/node_modules/.checked
# All that a build is made of; the OpenAPI document gives it its types.
DASHBOARD_SOURCES := $(shell find dashboard -type f -not -path '*/node_modules/*' \
	-not -path 'dashboard/dist/*' -not -path '*/generated/*') tests/api/openapi.json

MLFLOW_SERVER := $(VENV)/mlflow-server

.PHONY: install mlflow-server dashboard dashboard-check demo lint test test-all chaos clean

install: $(VENV)/.installed

# torch comes first and pinned: a bare "torch" resolves to the newest CUDA build.
$(VENV)/.installed: pyproject.toml constraints/ci.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints/ci.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/ci.txt -e '.[dev]'
	touch $@

# A real MLflow for the tests, out of the way of our own packages.
mlflow-server: $(MLFLOW_SERVER)/.installed

$(MLFLOW_SERVER)/.installed: constraints/mlflow.txt | install
	rm -rf $(MLFLOW_SERVER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 5 --no-deps \
		--target $(MLFLOW_SERVER) -r constraints/mlflow.txt
	touch $@

dashboard: $(DASHBOARD_BUILT)

$(DASHBOARD_BUILT): $(DASHBOARD_SOURCES) | install
	dashboard/build.sh $(BIN)/python build
	touch $@

# Types, style and the tests of its logic. Both write node_modules and the generated types, so that
# this one waits for the other where make runs several (-j).
dashboard-check: $(DASHBOARD_CHECKED)

$(DASHBOARD_CHECKED): $(DASHBOARD_SOURCES) | install $(DASHBOARD_BUILT)
	dashboard/build.sh $(BIN)/python check
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fp8core api/octrain_api worker/octrain_worker octrain benchmarks
	$(BIN)/lint-imports

# The dashboard needs npm's registry; the demo does not need the dashboard.
demo: install
	$(MAKE) --no-print-directory dashboard || echo "The demo goes on without the dashboard." >&2
	$(BIN)/python -m octrain.demo

test: lint dashboard-check dashboard
	$(PYTEST) -m "not slow and not gpu"

test-all: lint dashboard-check dashboard mlflow-server
	$(PYTEST) -m "not gpu"

chaos: install
	$(TEST_ENV) $(BIN)/python -m tests.chaos --seed $(SEED) --duration $(DURATION) --jobs $(JOBS)

clean:
	rm -rf dashboard/node_modules dashboard/dist
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist build
