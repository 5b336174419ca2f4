import importlib.util
from pathlib import Path

import pytest

from helpers.ranks.gang import GLOO, Gang, close_gangs, gang_on

HERE = Path(__file__).parent
IMPORTS = ("peft",) if importlib.util.find_spec("peft") else ()
"""What every rank would import by itself: with transformers, it takes seconds."""


@pytest.fixture
def gang(pytestconfig: pytest.Config) -> Gang:
    """Up to eight processes, the same ones for all tests of this folder."""
    return gang_on(GLOO, imports=IMPORTS if "not fast" in pytestconfig.option.markexpr else ())


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the processes with the last test of this folder: other tests look for what is left behind."""
    if nextitem is None or HERE not in nextitem.path.parents:
        close_gangs()
