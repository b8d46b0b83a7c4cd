# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make the environment .venv first.

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# Where it is set, each of the many processes that tests start would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo docs test test-quick test-long test-release test-xla test-newest test-mutants test-gpu check format lint types clean

help:            ## what there is
	@grep -E '^[a-z-]+: .*##|^[a-z-]+: *##' Makefile | sed 's/: .*##/:/' | column -t -s:

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@# setuptools warns of folders in the working directory that are called like the package.
	PYTHONWARNINGS=ignore::UserWarning $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@# Type checkers and editors of other projects look in folders on the path, and not through setuptools' import hook.
	@$(BIN)/python -c 'import pathlib, sysconfig; \
	    pathlib.Path(sysconfig.get_path("purelib"), "exact_trainer_types.pth").write_text(str(pathlib.Path("editable").absolute()))'
	@touch .venv/ready

demo: .venv/ready  ## train on handwritten digits, about half a minute
	$(BIN)/trainer fit --config examples/digits/config.yaml

# The tiers; tests/tiers.py says which test is in which, and CONTRIBUTING.md what for.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
SAMPLE ?= 0
SEED ?= 1

test: .venv/ready  ## every behaviour under every strategy, in 20 to 35 minutes on two cores
	$(PYTEST) -m "not long"

test-quick: .venv/ready  ## what starts few processes, in 3 minutes
	$(PYTEST) -m "not slow and not long"

test-long: .venv/ready  ## tests of which `make test` runs no case, kills and drawn inputs, in 10 to 20 minutes: SAMPLE=1 further case of each, SEED=1
	@# Where nothing can be installed the tests of packages fail, in words, after all others have run.
	-@$(MAKE) --no-print-directory .venv-packages/light
	$(PYTEST) -v -m "long or drawn" --sample $(SAMPLE) --seed $(SEED) --inputs 200 --minutes 0.5

test-release: .venv/ready  ## by hand before a release: whole matrices, 2000 drawn inputs, an hour of chaos: SEED=1
	-@$(MAKE) --no-print-directory .venv-packages/all
	$(PYTEST) -m "long or drawn" --seed $(SEED) --inputs 2000 --minutes 60
	$(BIN)/python -m tests.helpers.portability

# torch_xla needs an older torch, and one process per file: an error in XLA ends the process.
XLA_PYTHON ?= .venv-xla/bin/python
# The quick tier without what reads the source, files and words only; tests of packages that are not in this environment are skipped.
LOWEST := tests $(addprefix --ignore tests/,xla cli config lightning test_budget.py test_shape.py)

.venv-xla/ready: pyproject.toml constraints-xla.txt
	$(PYTHON) -m venv .venv-xla
	.venv-xla/bin/python -m pip install --quiet --constraint constraints-xla.txt --editable ".[metrics,tensorboard]" \
	    torch torch_xla pytest pytest-timeout pytest-xdist
	@touch .venv-xla/ready

test-xla: $(if $(filter .venv-xla/bin/python,$(XLA_PYTHON)),.venv-xla/ready)  ## tests on torch_xla's CPU devices and at the lowest versions, in .venv-xla (4 GB)
	@status=0; for file in tests/xla/test_*.py; do \
	    echo "== $$file"; timeout 1800 $(XLA_PYTHON) -m pytest -q --timeout 900 $$file || status=1; \
	done; \
	echo "== at the lowest versions"; $(XLA_PYTHON) -m pytest -q -n 2 --dist loadfile -m "not slow and not long" $(LOWEST) || status=1; exit $$status

# Packages that are built on Lightning, laid over .venv. Each is installed without its dependencies: what .venv has is
# used, above all torch, and constraints-packages.txt has the rest.
INSTALL_PACKAGES := $(BIN)/python -m pip --python .venv-packages/bin/python install --quiet --no-deps
LIGHT_PACKAGES := lightning neuralforecast coreforecast utilsforecast pytorch-forecasting scikit-base

.venv-packages/ready: .venv/ready constraints-packages.txt
	$(BIN)/python -m venv --clear --without-pip .venv-packages
	@.venv-packages/bin/python -c 'import pathlib, sysconfig, sys; \
	    pathlib.Path(sysconfig.get_path("purelib"), "project.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	    "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

.venv-packages/light: .venv-packages/ready
	$(INSTALL_PACKAGES) --constraint constraints-packages.txt $(LIGHT_PACKAGES)
	@touch $@

.venv-packages/all: .venv-packages/light
	$(INSTALL_PACKAGES) --requirement constraints-packages.txt
	@touch $@

# torch alone is newer here than in constraints.txt, where it is a small build for CPUs.
NEWEST_TORCH := 2.14.1

.venv-newest/ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv-newest
	grep -Ev '^(torch|triton|nvidia-.*|cuda-.*)==' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip install --quiet torch==$(NEWEST_TORCH)
	.venv-newest/bin/python -m pip install --quiet --constraint .venv-newest/constraints.txt --editable ".[dev]" torch==$(NEWEST_TORCH)
	@touch .venv-newest/ready

test-newest: .venv-newest/ready  ## the quick tier and the strategies' tests with the newest torch, in .venv-newest (6 GB)
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile -m "not slow and not long" --ignore tests/test_budget.py --ignore tests/test_shape.py
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile -m "not long" tests/strategies

test-mutants: .venv/ready  ## lines made wrong one at a time, each with the tests that find it, in 6 minutes
	$(BIN)/python -m tests.mutants

# In the interpreter given, with the torch that is there: no environment is made. Writes gpu-report.md.
PART ?= all

test-gpu:        ## tests and figures on CUDA devices: make test-gpu [PART=tests|strategies|overhead|gpt2|saves|parallel] [PYTHON=...]
	$(PYTHON) -m benchmarks gpu --part $(PART)

check: format lint types test  ## what a change has to pass

format: .venv/ready  ## format the code
	$(BIN)/ruff format .

lint: .venv/ready  ## is it formatted, does it follow the rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/ready  ## mypy --strict
	$(BIN)/mypy

docs: .venv/ready  ## the site, in build/site: every link leads somewhere, every name of the reference exists
	$(BIN)/python docs/collect_pages.py
	$(BIN)/zensical build --strict --clean --config-file mkdocs.yml

clean:           ## remove what was made here
	rm -rf .venv .venv-xla .venv-newest .venv-packages build dist runs *.egg-info .mypy_cache .pytest_cache .ruff_cache .cache
