"""How a rank with a GPU keeps a valid state when another rank is lost.

On a CPU, a collective operation that fails raises, so no update is made from its result. On a GPU, the calls of a step
only enqueue work. When a rank is lost, the survivors abort the operation in which they wait for it. That operation then
completes with garbage, and the device goes on with whatever the host has enqueued behind it. An update among that would
be made from garbage, and an event recorded after it would say that it is complete.

Therefore the host enqueues an update only after :class:`Confirmation`, and so an update is never made from garbage:

1. Only an abort makes garbage, on any of the ranks that communicate. No rank aborts before all ranks have marked the
   generation as ended (``driver/run/run_workers.py``).
2. The host has seen the event completed and, after that, found the generation not marked. So everything before the
   event had completed before any abort: the gradients, their all-reduce, and the norm.
3. Nothing that other ranks take part in is enqueued between the event and the update. The update therefore completes,
   whatever happens to the collective operations of the next step.

A rank that fails or is freed has thus made exactly the updates of the steps that it counts as completed: the exception
comes before the update of the next step, or after that step is counted. What else an interrupted step has changed is
undone when the next generation begins (``Trainer.attach``). Where the state of a rank is in the memory of its replicas
alone, the update is made then instead if another rank has made its own (``MeshTrainer.recover_state``): that rank has
the norm of the whole gradient, so every rank has its gradients. The same wait stands before received state is loaded
and before numbers from the device are reported or saved.

The host queries the event, so that the driver's word frees it even if the abort takes time. A step pays for this with
the time to launch its update, because the host is not ahead of the device there. With ``recovery.max_failures=0`` no
state has to survive, and the host does not wait. A flag on the device that fused optimizers read (``found_inf``) would
let the host go on. But where the device leaves out an update, the moving average of the weights, the learning-rate
schedule and optimizers without a fused update would have to be undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

POLL_S = 5e-5
SPIN_S = 2e-4
"""A pause lasts up to 100 us longer than it should, and the GPU has nothing to do meanwhile. So the host makes none in
a short wait; a long one, for a slow rank, must not take a CPU."""


def no_confirmation() -> None:
    """Return at once: what was called has completed, or raised."""


class Confirmation:
    """Waits until what has been enqueued is complete, and raises if it may be garbage.

    Args:
        check: raises if the generation is marked as ended.
        waits: whether to wait; otherwise the caller has read a number from the device, and only has to know its worth.
        record: records an event behind the work that has been enqueued.
        spin_s: for how long to wait without a pause.
    """

    def __init__(
        self, check: Callable[[], None], *, waits: bool, record: Callable[[], torch.cuda.Event], spin_s: float = SPIN_S
    ):
        self._check = check
        self._waits = waits
        self._record = record
        self._spin_s = spin_s

    def __call__(self) -> None:
        if self._waits:
            event = self._record()
            spins_until = time.perf_counter() + self._spin_s
            while not event.query():
                self._check()
                if time.perf_counter() > spins_until:
                    time.sleep(POLL_S)
        self._check()


def confirmation(
    device: torch.device, check: Callable[[], None], *, has_peers: bool, recovers: bool
) -> Callable[[], None]:
    """Return what a rank calls before it makes an update, or uses numbers that other ranks contribute to.

    Args:
        check: raises if the generation is marked as ended.
        has_peers: whether there are other ranks.
        recovers: whether the state of this rank may have to survive a failure of another.
    """
    if device.type != "cuda" or not has_peers:
        return no_confirmation
    return Confirmation(check, waits=recovers, record=lambda: torch.cuda.current_stream().record_event())
