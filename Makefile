# `make help` lists what there is.
ARGS ?=

.PHONY: help install test coverage check format docs ci
help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'
install: ## what developing needs, into the active environment
	pip install -e '.[test]' pre-commit && pre-commit install
test: ## the tests; ARGS="-n auto" runs them in parallel, ARGS="tests/core -x" some
	pytest $(ARGS)
coverage: ## the tests, traced: fails below the floor in pyproject.toml
	pytest -n auto --cov --cov-report=term
check: ## format, lint, types, import directions
	ruff format --check && ruff check && mypy && lint-imports
format: ## format, and mend what the linter can
	ruff check --fix && ruff format
docs: ## the site, into site/; `mkdocs serve` shows it while you write
	pip install -q -e '.[docs]' && mkdocs build
ci: ## all that a change must pass, in a clean environment
	.ci/run
