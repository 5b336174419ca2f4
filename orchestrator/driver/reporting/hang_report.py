"""What is left in the run directory of a hang: the stacks of all ranks, and with NCCL what each had enqueued."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import Stacks
from orchestrator.records.run_dir import RunDir


def write_stacks(run_dir: RunDir, generation: int, plan: Plan, stacks: Mapping[int, Stacks]) -> str:
    """Write the stacks of all ranks to a file, and flight records to files beside it.

    Args:
        run_dir: the run.
        generation: the number of the generation that hung.
        plan: its plan.
        stacks: what the ranks that answer do.

    Returns:
        The path of the file with the stacks, or why there is none.
    """
    path = run_dir.stacks_file(generation)
    try:
        path.write_text("\n".join(_text(rank, plan, stacks.get(rank)) for rank in range(plan.world_size)))
        for rank, stack in stacks.items():
            if stack.flight is not None:
                run_dir.flight_file(generation, rank).write_bytes(zlib.decompress(stack.flight.dump))
    except OSError as e:
        return f"not written ({e.strerror})"
    return run_dir.location_of(path)


def _text(rank: int, plan: Plan, stacks: Stacks | None) -> str:
    return f"==== {plan.display_name(rank)}\n{'does not answer' if stacks is None else stacks.text}\n"
