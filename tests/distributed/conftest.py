from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from helpers.gang import Gang

HERE = Path(__file__).parent


@cache
def the_gang() -> Gang:
    return Gang()


@pytest.fixture
def gang() -> Gang:
    """Up to four processes, the same ones for all tests of this folder."""
    return the_gang()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the processes with the last test of this folder: other tests look for what is left behind."""
    if the_gang.cache_info().currsize and (nextitem is None or HERE not in nextitem.path.parents):
        the_gang().close()
        the_gang.cache_clear()
