.PHONY: check lint format types test docs

check: lint types test

lint:
	ruff check .
	ruff format --check .

format:
	ruff check --fix .
	ruff format .

types:
	pyright

test:
	pytest

docs:
	mkdocs build --strict
