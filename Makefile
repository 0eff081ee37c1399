# Two commands do everything on a machine with Python 3.11 or newer: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/shapes
DEMO_FLAGS ?=
PY = $(VENV)/bin/python

.PHONY: demo report test lint bench env clean

env: $(VENV)/.installed

$(VENV)/.installed: requirements.txt requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -r requirements-dev.txt -e .
	touch $@

demo: env
	$(PY) train.py --config configs/shapes.py --workdir $(RUN) $(DEMO_FLAGS)
	$(PY) eval.py --config configs/shapes.py --workdir $(RUN) $(DEMO_FLAGS)

# Every trained row afresh on five seeds: hours.
report: env
	$(PY) -m stepprune_jax.studies.seeds --config configs/shapes.py --workdir runs/seeds \
	  --seeds 0 1 2 3 4 --processes 2

test: env
	$(PY) -m pytest -n 2 --dist loadfile

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo

bench: env
	$(PY) -m stepprune_jax.bench.policy --repeats 5
	$(PY) -m stepprune_jax.bench.backbone --attention matmul xla --load_gb 2

clean:
	rm -rf $(VENV) runs build *.egg-info
