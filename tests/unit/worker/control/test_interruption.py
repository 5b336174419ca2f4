"""Code of the user is cut off when the ranks have to stop, in each call that takes long."""

import time

import pytest

from orchestrator.worker.control.control import CutOff
from orchestrator.worker.control.interruption import Interruption

DELAY_S = 0.1


def block() -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.timeout(30)
def test_each_call_that_takes_long_is_cut_off_while_a_stop_is_due() -> None:
    due = False
    interruption = Interruption(lambda: due, delay_s=DELAY_S)
    assert interruption.run(lambda: 1) == 1
    due = True
    interruption.look()
    for _ in range(3):
        with pytest.raises(CutOff):
            interruption.run(block)
        assert interruption.run(lambda: 2) == 2
    due = False
    interruption.look()
    assert interruption.run(lambda: time.sleep(2 * DELAY_S)) is None
