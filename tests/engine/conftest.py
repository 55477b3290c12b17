"""Contracts of the engine are those of every family."""

from typing import cast

import pytest

from tests.bundled import MINIS, Mini


@pytest.fixture(scope="module", params=MINIS, ids=str)
def mini(request: pytest.FixtureRequest) -> Mini:
    """Tests that ask for it run on every bundled model, or on the random one of its family."""
    return cast(Mini, request.param)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A module's tests go to one worker: what they are compared with, answers of whole models, is computed once."""
    if not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
