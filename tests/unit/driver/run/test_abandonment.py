"""The order in which the ranks of a failed generation learn of its end."""

from collections.abc import Collection
from typing import Any

import pytest

from orchestrator.driver.run.run_workers import abandon


class Calls:
    """Looks like the gang: records what it is asked, and of which ranks. Those in ``silent`` do not answer."""

    def __init__(self, silent: Collection[int] = ()):
        self.silent = silent
        self.made: list[tuple[str, set[int]]] = []

    def tell(self, method: Any, *_: Any, ranks: Collection[int]) -> None:
        self.made.append((f"tell {method.__name__}", set(ranks)))

    def poll(self, method: Any, *_: Any, ranks: Collection[int], **__: Any) -> dict[int, None]:
        self.made.append((f"poll {method.__name__}", set(ranks)))
        return dict.fromkeys(set(ranks) - set(self.silent))

    def kill(self, rank: int) -> None:
        self.made.append(("kill", {rank}))


def made(*, aborts: bool, silent: Collection[int] = ()) -> list[tuple[str, set[int]]]:
    calls: Any = Calls(silent)
    abandon(calls, 4, ("10.0.0.1",), training={0, 2, 3}, failed={1}, aborts=aborts, check=lambda: None)
    return calls.made


def test_with_gloo_those_that_train_are_told() -> None:
    assert made(aborts=False) == [("tell abandon", {0, 2, 3})]


@pytest.mark.parametrize(
    ("silent", "killed"), [((), []), ((2,), [("kill", {2})])], ids=["all answer", "one does not answer"]
)
def test_with_nccl_no_rank_aborts_before_all_others_know_or_are_dead(
    silent: Collection[int], killed: list[tuple[str, set[int]]]
) -> None:
    expected = [("poll abandon", {0, 2, 3}), *killed, ("tell abort", {0, 1, 2, 3} - set(silent))]
    assert made(aborts=True, silent=silent) == expected
