"""Several ranks in one process, of which one runs at a time, up to the next sum over all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from orchestrator.model.tensor.peers import Peers

T = TypeVar("T")

TIMEOUT_S = 600
"""How long a rank waits for its turn."""


def in_lockstep(count: int, run: Callable[[int, Peers], T]) -> list[T]:
    """Run ``run(index, peers)`` for each of ``count`` ranks, on threads that take turns.

    Each has the state of torch's random generator of the CPU to itself; all begin with the present one, which remains.

    Raises:
        Exception: the first that a rank raises. Ranks that differ in their sums raise RuntimeError.
    """
    turns = _Turns(count)
    results: dict[int, T] = {}

    def of_rank(index: int) -> None:
        try:
            turns.take(index)
            results[index] = run(index, _InTurn(turns, index))
        except Exception as e:
            turns.error = turns.error or e
        finally:
            turns.end(index)

    state = torch.get_rng_state()
    threads = [threading.Thread(target=of_rank, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    turns.begin()
    for thread in threads:
        thread.join()
    torch.set_rng_state(state)
    if turns.error is not None:
        raise turns.error
    return [results[index] for index in range(count)]


class _InTurn(Peers):
    def __init__(self, turns: _Turns, index: int):
        self._turns = turns
        self._index = index

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._turns.exchanged(self._index, tensor)).sum(dim=0)

    def gather(self, part: Tensor, count: int, *, axis: int) -> Tensor:
        return torch.cat(self._turns.exchanged(self._index, part), dim=axis)

    def scatter(self, tensor: Tensor, index: int, count: int, *, axis: int) -> Tensor:
        return self.sum(tensor).chunk(count, dim=axis)[index]


class _Turns:
    """Whose turn it is, and what has been given for each sum."""

    def __init__(self, count: int):
        self.error: Exception | None = None
        self._count = count
        self._ready = [threading.Semaphore(0) for _ in range(count)]
        self._running = list(range(count))
        self._given: list[list[Tensor]] = []
        self._sums = [0] * count
        self._states = [torch.get_rng_state()] * count

    def begin(self) -> None:
        self._ready[0].release()

    def take(self, index: int) -> None:
        if not self._ready[index].acquire(timeout=TIMEOUT_S):
            raise TimeoutError(f"rank {index} has had no turn for {TIMEOUT_S} s")
        torch.set_rng_state(self._states[index])
        if self.error is not None:
            raise RuntimeError("another rank has failed")

    def exchanged(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, given that of one."""
        number = self._sums[index]
        self._sums[index] += 1
        if number == len(self._given):
            self._given.append([])
        given = self._given[number]
        given.append(tensor)
        self._pass_on(index)
        self.take(index)
        if len(given) < self._count or any(other.shape != tensor.shape for other in given):
            raise RuntimeError("the ranks do not compute the same sums")
        return given

    def end(self, index: int) -> None:
        following = self._after(index)
        self._running.remove(index)
        if following is not None:
            self._ready[following].release()

    def _pass_on(self, index: int) -> None:
        self._states[index] = torch.get_rng_state()
        following = self._after(index)
        self._ready[index if following is None else following].release()

    def _after(self, index: int) -> int | None:
        """Return who is next after a running rank; None if no other one runs."""
        own = self._running.index(index)
        following = self._running[(own + 1) % len(self._running)]
        return None if following == index else following
