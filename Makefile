# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest

.PHONY: demo test lint types tests test-slow test-oldest bench clean

# The folder of the target with one of our extras, in the versions of the second prerequisite.
define install
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $(word 2,$^) --editable ".[$(1)]"
	touch $@
endef

# Installed again when what is required changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,dev)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(call install,test)

demo: $(VENV)/.installed
	mkdir -p demo
	$(BIN)/gramcert audit --no-cache --html demo/report.html --certificate demo/certificate.json
	$(BIN)/gramcert verify demo/certificate.json
	@echo "The report is demo/report.html, the certificate demo/certificate.json"

test: lint types tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy --strict src

tests: $(VENV)/.installed
	$(BIN)/pytest -m "not slow" -n 2

# New random layers every time, and the memory of large ones.
test-slow: $(VENV)/.installed
	HYPOTHESIS_PROFILE=slow $(BIN)/pytest

# The lower bounds of pyproject.toml, with Python 3.11. Its torch brings 3 GB of CUDA, which nothing here needs.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/pytest -m "not slow" -n 2

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bounds.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/enclosures.py
	$(BIN)/python benchmarks/zero_padding.py
	$(BIN)/python benchmarks/resnet18.py
	$(BIN)/python benchmarks/real_sizes.py
	$(BIN)/python benchmarks/real_layers.py
	$(BIN)/python benchmarks/rescaling.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/projection.py
	$(BIN)/python benchmarks/auditing.py

clean:
	rm -rf $(VENV) $(OLDEST) demo
