from __future__ import annotations

from pathlib import Path

import pytest

from helpers.ranks.gang import GLOO, Gang, close_gangs, gang_on

HERE = Path(__file__).parent


@pytest.fixture
def gang() -> Gang:
    """Up to four processes, the same ones for all tests of this folder."""
    return gang_on(GLOO)


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the processes with the last test of this folder: other tests look for what is left behind."""
    if nextitem is None or HERE not in nextitem.path.parents:
        close_gangs()
