"""What is known of the streams of other libraries: Hugging Face ``datasets`` (its internals, as of 5.2.0), LitData,
MosaicML Streaming and WebDataset. All are optional, and none is imported here.
"""

from __future__ import annotations

import itertools
from types import FunctionType, ModuleType
from typing import Any

CHECKED_VERSION = "5.2.0"

_SHUFFLED = "BufferShuffledExamplesIterable"
DIVIDING = {"litdata": "LitData", "streaming": "MosaicML Streaming"}
"""By package, the libraries all of whose streams give each rank samples of its own."""
SPLITTER = "split_by_node"
MOST = 1000
"""Among how many values of a stream another one is looked for."""


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
    """Return what in ``stream``, or in a stream that it wraps, gives each rank samples of its own; None if all do."""
    found, known = [stream], {id(stream)}
    for value in itertools.islice(found, MOST):  # which grows
        if isinstance(value, FunctionType) and value.__name__ == SPLITTER and value.__module__.startswith("webdataset"):
            return f"{SPLITTER} of WebDataset"
        if isinstance(value, (type, ModuleType, FunctionType)):
            continue
        libraries = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
        if (library := next((name for name in DIVIDING if name in libraries), None)) is not None:
            return DIVIDING[library]
        own = getattr(value, "__dict__", {})
        if "datasets" in libraries and getattr(own.get("_distributed"), "world_size", 1) > 1:
            return "split_dataset_by_node"
        parts = value if isinstance(value, (list, tuple)) else (value if isinstance(value, dict) else own).values()
        new = [part for part in itertools.islice(parts, MOST) if id(part) not in known]
        found += new
        known.update(map(id, new))
    return None
