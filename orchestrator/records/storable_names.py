"""Names and texts as MLflow, and any database below it, can store them. Pure."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

_MAX_LENGTH = 250
_DIGEST_LENGTH = 8

_REFUSED = re.compile(
    r"[^a-zA-Z0-9_\-./: ]"
    r"|^/|/(?=/|$)|^\.(?=\.)|(?:^|(?<=/))\.(?=\.?(?:/|$))"  # of a path that is not the shortest one
    r"|_(?=x[0-9a-f]+(?:[^a-zA-Z0-9\-./: ]|/(?:/|$)))"  # would read as the beginning of an escape
)
_KEY_OF_LINE = re.compile(r"_*(step|time|continues)?")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


@functools.cache
def storable_name(name: str) -> str:
    """Return ``name`` with ``_x40_`` for ``@``, and likewise for all that MLflow refuses in names.

    No two names become one. A name of more than 250 characters is cut, and ends with a digest of the whole.
    """
    stored = _REFUSED.sub(lambda match: f"_x{ord(match[0]):x}_", name)
    if len(stored) <= _MAX_LENGTH:
        return stored
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    return f"{stored[: _MAX_LENGTH - _DIGEST_LENGTH - 1]}-{digest}"


def storable_text(text: str, length: int) -> str:
    """Return ``text``, cut to ``length`` characters with a mark and a digest of the whole: no two become one."""
    if len(text) <= length:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    mark = f"... (cut: {len(text):,} characters, {digest})"
    return text[: length - len(mark)] + mark


def metric_name(name: str) -> str:
    """Return ``name`` as the journal and MLflow have it; ``_step`` for ``step``, which is another key of a line."""
    name = storable_name(name)
    return f"_{name}" if _KEY_OF_LINE.fullmatch(name) else name


def storable(value: Any) -> Any:
    """Return nested data with ``\\ufffd`` in its texts for NUL and for lone surrogates. Keys stay as they are.

    Python has such surrogates in place of bytes that are not UTF-8, as in the names of files.
    """
    if isinstance(value, str):
        return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, Mapping):
        return {key: storable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [storable(item) for item in value]
    return value
