"""Contracts of the engine are those of every family."""

from typing import cast

import pytest

from tests.bundled import MINIS, Mini


@pytest.fixture(scope="module", params=MINIS, ids=str)
def mini(request: pytest.FixtureRequest) -> Mini:
    """Tests that ask for it run on every bundled model, or on the random one of its family."""
    return cast(Mini, request.param)
