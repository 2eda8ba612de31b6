# `make help` lists the commands.
ARGS ?=

.PHONY: help install test complete coverage check format docs ci
help: ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'
install: ## install the package for development into the active environment
	pip install -e '.[test]' pre-commit && pre-commit install
test: ## the tests, on every core; ARGS="tests/core -x" runs some of them
	pytest $(ARGS)
complete: ## the tests of both tiers, those marked nightly too
	pytest -m '' $(ARGS)
coverage: ## the tests with coverage: fails below the floor in pyproject.toml
	pytest -n auto --cov --cov-report=term
check: ## format, lint, types, import directions
	ruff format --check && ruff check && mypy && lint-imports
format: ## format, and apply the linter's fixes
	ruff check --fix && ruff format
docs: ## build the site into site/; `mkdocs serve` previews it
	pip install -q -e '.[docs]' && mkdocs build
ci: ## all checks that a change must pass, in a clean environment
	.ci/run
