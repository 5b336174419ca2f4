"""What is known of the streams of other libraries: Hugging Face ``datasets`` (its internals, as of 5.2.0), LitData, and
MosaicML Streaming. All are optional, and none is imported here.
"""

from __future__ import annotations

from typing import Any

CHECKED_VERSION = "5.2.0"

_SHUFFLED = "BufferShuffledExamplesIterable"


def loses_samples(stream: Any) -> bool:
    """Return whether ``stream`` is one of ``datasets`` whose ``state_dict()`` leaves samples out.

    ``shuffle(buffer_size=n)`` holds up to n samples, which are not in the state. A buffer of 1 holds none.
    """
    sources: list[Any] = [getattr(stream, "_ex_iterable", None)]
    while sources:
        source = sources.pop()
        if type(source).__name__ == _SHUFFLED and source.buffer_size > 1:
            return True
        sources += [source.ex_iterable] if hasattr(source, "ex_iterable") else getattr(source, "ex_iterables", ())
    return False


def divides_by_rank(stream: Any) -> str | None:
    """Return the library whose ``stream`` gives each rank samples of its own; None for a stream that gives all."""
    library = type(stream).__module__.partition(".")[0]
    if library in ("litdata", "streaming"):
        return {"litdata": "LitData", "streaming": "MosaicML Streaming"}[library]
    divided = library == "datasets" and getattr(getattr(stream, "_distributed", None), "world_size", 1) > 1
    return "split_dataset_by_node" if divided else None
