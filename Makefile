PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test lint demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/installed
	$(BIN)/ruff check .

demo: $(VENV)/installed
	$(BIN)/python -m experiments.demo

# The stamp is older than setup.py after a change of dependencies: install again, same venv.
$(VENV)/installed: setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@
