# Two commands do everything: `make demo` and `make test`. Both set up .venv first and reuse it afterwards.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all e2e browser lint format bench bench-check docs docs-test lock clean

demo: $(READY)
	$(BIN)/coterie compare heart_disease --client hospital --target sick --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: $(READY) browser
	$(BIN)/pytest -n 2 -m "not slow and not e2e"

test-all: $(READY) browser
	$(BIN)/pytest -n 2 -m "not e2e"

# One process, because the tests share one federation.
e2e: $(READY)
	$(BIN)/pytest -n 0 -m e2e tests/e2e

# The report is tested in a real browser; without one those tests are skipped.
browser:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 \
		|| echo "no chromium, and it could not be installed: the tests of the report in a browser are skipped"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation, in site/index.html; warnings are errors, and nothing is fetched.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every command, snippet and notebook of the documentation is run.
docs-test: $(READY)
	$(BIN)/pytest -n 2 -m slow tests/test_docs.py tests/test_docs_site.py

# Speed beside other libraries (installed on the first call, each in an environment of its own under .bench/).
bench: $(READY)
	$(BIN)/python -m benchmarks --install

# Fails where speed relative to a plain loop in the same run fell by more than a fifth.
bench-check: $(READY)
	$(BIN)/python -m benchmarks check

$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard coterie/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev,docs]"
	touch $@

# Write down the versions in .venv as the new pins.
lock: $(READY)
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' | sort -f > constraints.txt

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
