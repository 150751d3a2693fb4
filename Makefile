# `make demo` and `make test` are the two commands to start with. Each command installs into .venv what it needs
# and lacks; a file such as .venv/.test says what is there.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.PHONY: demo test test-slow test-all e2e fuzz faults browser lint format bench bench-check docs docs-version docs-test lock release-check clean
.NOTPARALLEL:

demo: .venv/.core
	$(BIN)/coterie demo

# A file at a time, because its tests share what they trained.
test: .venv/.test browser
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not e2e"

# What takes long: paper figures, statistical checks, commands and notebooks of the documentation.
test-slow: .venv/.test .venv/.docs browser
	$(BIN)/pytest -n 2 -m "slow and not e2e"

test-all: test test-slow

# One process, because the tests share one federation. FLWR=1.42.0 takes another version of Flower, beside the pinned one.
e2e: .venv/.test
	$(if $(FLWR),test -d .flwr/$(FLWR) || $(BIN)/python -m pip install --quiet --no-deps --target .flwr/$(FLWR) flwr==$(FLWR))
	$(if $(FLWR),PYTHONPATH=$(CURDIR)/.flwr/$(FLWR) )$(BIN)/pytest -n 0 -m e2e tests/e2e

# Random tables, damaged files and all commands; prints counts, what went wrong, and the time left.
fuzz: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --tables 10000

# Commands and federations are killed at random moments, disks are full, certificates are old; takes an hour or two.
faults: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --moments 20

# The report is tested in a real browser; without one those tests are skipped. What drives it needs libatomic, which bare
# machines lack.
browser:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium libatomic1; } >/dev/null 2>&1 \
		|| echo "no chromium, and it could not be installed: the tests of the report in a browser are skipped"

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation, in site/index.html; warnings are errors, and nothing is fetched.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The same as a version of its own on the branch gh-pages, beside those that are there; nothing is pushed.
docs-version: .venv/.docs
	NO_MKDOCS_2_WARNING=1 DOCS_VERSIONS=mike $(BIN)/mike deploy --update-aliases \
		$$(sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' coterie/__init__.py) latest
	$(BIN)/mike set-default latest

# Every command, snippet and notebook of the documentation is run.
docs-test: .venv/.test .venv/.docs
	$(BIN)/pytest -n 2 tests/test_docs.py tests/test_docs_site.py tests/test_readme.py

# Speed beside other libraries (installed on the first call, each in an environment of its own under .bench/).
bench: .venv/.core
	$(BIN)/python -m benchmarks --install

# Fails where speed fell by more than a fifth from an earlier revision, which is built and runs in turn with this one.
bench-check: .venv/.core
	$(BIN)/python -m benchmarks check

# Builds wheels and sdist twice into dist/, compares the bytes, installs them into empty environments (without extras,
# with each, without a compiler) and runs every command there. Takes a quarter of an hour; WAYS=core,tune takes less.
release-check: .venv/.release
	$(BIN)/python -m release $(if $(WAYS),--install $(WAYS))

# The package with what it cannot do without; its C library is built here. The wheel of torch has 124 MB of its own
# C++ tests, which nothing here runs. Bytecode is written when a module is first imported.
.venv/.core: pyproject.toml constraints.txt hatch_build.py $(wildcard coterie/_core/native/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	rm -rf .venv/lib/python3*/site-packages/torch/test .venv/lib/python3*/site-packages/torch/bin/test_*
	touch $@

# The other groups add their extras to it.
.venv/.test: .venv/.core
	$(PIP) "coterie[all,test]"
	touch $@

# All optional packages, because mypy checks the calls to them.
.venv/.lint: .venv/.core
	$(PIP) "coterie[all,lint]"
	touch $@

.venv/.docs: .venv/.core
	$(PIP) "coterie[docs]"
	touch $@

.venv/.release: .venv/.core
	$(PIP) "coterie[release]"
	touch $@

# Write down the versions in .venv as the new pins, and look up the hashes of their files.
lock: .venv/.test .venv/.lint .venv/.docs .venv/.release
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' | sort -f > constraints.txt
	$(BIN)/python -m release.lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
