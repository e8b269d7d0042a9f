"""Fixtures of the tests of Triton kernels."""

from __future__ import annotations

import pytest
from interpreter import interpreted_checks


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """What the checks of the test module's ``CASES`` say under the interpreter."""
    return interpreted_checks(request.module.CASES)
