"""When a run may acquire its workers and has to leave them: at once and never, unless a feature says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Self

from orchestrator import features

if TYPE_CHECKING:
    from orchestrator.driver.process.run_context import EventStream
    from orchestrator.driver.process.signals import StopSignals


def turns_of(*run: Any, **more: Any) -> Callable[..., Turns]:
    """Return what makes the turns of a run, as :func:`turns_of` of the module ``turns`` of a feature does."""
    found = next(features.modules("turns"), None)
    return Turns if found is None else found.turns_of(*run, **more)


class Turns:
    """The turns of a run that shares its cluster with nobody, or does not wait for others. Use as a context manager.

    Args:
        timeout_s: the longest wait for a turn; None for no limit.
        unfit_timeout_s: the longest wait while the cluster is too small for the run; None for no limit.
        known_namesakes: the uids of other runs of this name that the user has been warned of.
        reserved: returns how many workers the run has reserved resources for, by the id of their node. Called by
            another thread, as ``avoids``.
        avoids: returns why no worker of the run may start on some nodes, by node id.

    Attributes:
        waited_s: how long the run has waited for its turns, in seconds.
    """

    def __init__(
        self,
        events: EventStream,
        stop: StopSignals,
        *,
        timeout_s: float | None = None,
        unfit_timeout_s: float | None = None,
        known_namesakes: Collection[str] = (),
        reserved: Callable[[], Mapping[str, int]] = dict,
        avoids: Callable[[], Mapping[str, str]] = dict,
    ):
        self.waited_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait_for_turn(self, check: Callable[[], None]) -> None:
        """Wait until the run may acquire its workers.

        ``check()`` is called several times a second, and may raise to stop waiting.

        Raises:
            GangError: the longest wait has passed.
            UnfitError: the cluster has been too small for too long.
        """

    def check_turn(self) -> None:
        """Check that no other run has come before this one, which acquires its workers.

        Raises:
            TurnLostError: one has.
        """

    def offer_turn(self) -> None:
        """Give the turn back if other runs wait: nobody knows yet why this one finds no room.

        Raises:
            TurnLostError: others wait.
        """

    def has_workers(self) -> None:
        """Report that the run has its workers."""

    def begin_yielding(self) -> None:
        """Report that the run is about to release its workers."""

    @property
    def yield_to(self) -> str | None:
        """The name of the run that needs the resources of this one; None to keep them."""
        return None

    @property
    def others_wait(self) -> bool:
        """Whether other runs wait for resources."""
        return False
