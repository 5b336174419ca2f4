"""Every use of the internals of Hugging Face ``datasets``, written against datasets 5.2.0. The package is optional."""

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
