"""Which batch is tried next, and when the search for the largest one ends."""

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.features.batch_size.sizes import Trial, fastest, next_size

NO_ROOM = "CUDA out of memory: tried to allocate 2.00 GiB"


def searched(trial: Callable[[int], Trial], **options: Any) -> tuple[list[int], str]:
    """The sizes that are tried, and why the search ends."""
    trials: list[Trial] = []
    given = {"first": 64, "least": 2, "largest": None, "on_cpu": False, "free_mb": None, **options}
    while True:
        size, why = next_size(trials, **given)
        if size is None:
            return [t.size for t in trials], why
        trials.append(trial(size))


def with_room_for(most: int) -> Callable[[int], Trial]:
    return lambda size: Trial(
        size=size, per_worker=size, samples_per_s=min(size, 256.0), refused=NO_ROOM if size > most else ""
    )


def with_memory(mb_of_sample: float) -> Callable[[int], Trial]:
    return lambda size: Trial(size=size, per_worker=size, samples_per_s=size, memory_mb=500 + mb_of_sample * size)


@pytest.mark.parametrize(
    ("trial", "options", "sizes", "why"),
    [
        (with_room_for(300), {}, [64, 128, 256, 512], "the next one does not fit"),
        (with_room_for(20), {}, [64, 32, 16], "twice as many do not fit"),
        (with_room_for(1), {"least": 8}, [64, 32, 16, 8], "no batch fits"),
        (with_room_for(2000), {"largest": 400}, [64, 128, 256], "--largest 400"),
        (with_room_for(9999), {"on_cpu": True}, [64, 128, 256, 512, 1024], "larger ones are no faster"),
        (with_room_for(2000), {"on_cpu": False}, [64, 128, 256, 512, 1024, 2048], "the next one does not fit"),
        (with_memory(1), {"on_cpu": True, "free_mb": 500}, [64, 128, 256, 512], "twice as many may not fit into the"),
    ],
)
def test_sizes_are_doubled_until_one_does_not_fit(
    trial: Callable[[int], Trial], options: dict[str, Any], sizes: list[int], why: str
) -> None:
    tried, ended = searched(trial, **options)
    assert tried == sizes
    assert ended.startswith(why)


def test_of_batches_that_are_as_fast_the_smallest_is_named() -> None:
    trials = [with_room_for(9999)(size) for size in (64, 128, 256, 512)]
    assert fastest(trials).size == 256
