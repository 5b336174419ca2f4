"""The ranks that compute the same blocks together, each with a part of their layers; and such ranks in one process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.compat.process_groups import all_gathered, all_reduced, reduce_scattered

T = TypeVar("T")

TURN_TIMEOUT_S = 600
"""How long a rank waits for its turn."""


class Peers:
    """The ranks that have the parts of the same layers.

    Attributes:
        group: the ranks; None outside of a generation, where nothing is summed.
        inside: whether this rank is computing what differs between them, in a forward or a backward pass. Compiled code
            does not say.
        waiting: returns a context for each sum that is not made by compiled code.
        tokens: the number of those of a sample, where each rank has some of them between the divided layers.
        gathered_logits: whether outputs for all words have been gathered, because something has read them.
    """

    group: dist.ProcessGroup | None = None
    inside = False
    waiting: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    tokens = 0
    gathered_logits = False

    def cross(self, *, inside: bool) -> None:
        """Take note that what follows in a pass differs between the ranks, or does not."""
        if not torch.compiler.is_compiling():
            self.inside = inside

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over the ranks."""
        return tensor if self.group is None else self._made(all_reduced, tensor, self.group)

    def gather(self, part: Tensor, count: int, *, axis: int) -> Tensor:
        """Return the parts of all ``count`` ranks, one after another along an axis."""
        if self.group is None:
            return torch.cat([part] * count, dim=axis)
        return self._made(functools.partial(all_gathered, axis=axis), part, self.group)

    def scatter(self, tensor: Tensor, index: int, count: int, *, axis: int) -> Tensor:
        """Return the part number ``index`` of ``count`` equal ones along an axis of the sum over the ranks."""
        if self.group is None:
            return tensor.chunk(count, dim=axis)[index]
        return self._made(functools.partial(reduce_scattered, axis=axis), tensor, self.group)

    def _made(
        self, operation: Callable[[Tensor, dist.ProcessGroup], Tensor], tensor: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        if self.waiting is None or torch.compiler.is_compiling():
            return operation(tensor, group)
        with self.waiting():
            return operation(tensor, group)


def is_differentiated(gradient: Tensor) -> bool:
    """Return whether a backward pass will be differentiated itself, as with ``create_graph``."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled() and gradient.requires_grad


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
        if not self._ready[index].acquire(timeout=TURN_TIMEOUT_S):
            raise TimeoutError(f"rank {index} has had no turn for {TURN_TIMEOUT_S} s")
        torch.set_rng_state(self._states[index])
        if self.error is not None:
            raise RuntimeError("another rank has failed")

    def exchanged(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, given that of one. No gradient goes from rank to rank."""
        number = self._sums[index]
        self._sums[index] += 1
        if number == len(self._given):
            self._given.append([])
        given = self._given[number]
        given.append(tensor.detach())
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
