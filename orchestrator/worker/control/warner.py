"""Warnings to the user, each once in a process."""

from __future__ import annotations

import traceback

from orchestrator.protocol.events import Warned
from orchestrator.worker.control.control import Outbox

MAX_CALL_WARNINGS = 10
"""The number of different errors of one method of the user that a process warns of."""


class Warner:
    """Puts each warning of rank 0 into the outbox once. The warnings of other ranks would repeat them.

    Attributes:
        rank: the present rank of this process.
    """

    def __init__(self, outbox: Outbox):
        self.rank = 0
        self._outbox = outbox
        self._topics: set[str] = set()

    def warn(self, text: str, *, topic: str) -> None:
        """Warn the user, unless this process has warned of ``topic`` before."""
        if self.rank == 0 and topic not in self._topics:
            self._topics.add(topic)
            self._outbox.put_event(Warned(message=text))

    def warn_from_any_rank(self, text: str) -> None:
        """Warn the user of what one rank alone has found, which need not be rank 0."""
        self._outbox.put_event(Warned(message=text))

    def warn_of_call(self, text: str, *, method: str, step: int) -> None:
        """Warn the user of an error in a ``method`` of theirs, once for each text, and print the present traceback.

        Texts beyond the first few are not shown: they may have a number that differs at every step.
        """
        topic = f"{method}: {text}"
        reported = sum(known.startswith(f"{method}: ") for known in self._topics)
        if topic in self._topics or reported == MAX_CALL_WARNINGS:
            return
        traceback.print_exc()
        self._topics.add(topic)
        last = f"; further errors of {method} are not reported" if reported + 1 == MAX_CALL_WARNINGS else ""
        self.warn_from_any_rank(f"{text}, at step {step}: see the log of rank {self.rank}; training continues{last}")
