"""Masks secrets before configuration reaches a file, a tracking server or a message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
_SECRET_KEY = re.compile(r"secret|passw(or)?d|passphrase|credential|(api|access|private)_?key", re.IGNORECASE)
# Language models have many harmless keys of this kind: token_dim, num_tokens, tokenizer, pad_token.
_TOKEN_KEY = re.compile(r"(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!mask_)token(?!i[sz]|s)", re.IGNORECASE)
_USERINFO = re.compile(r"(\w[\w+.-]*://)[^/?#\s:@]*:[^/?#\s]*@")
_QUERY_VALUE = re.compile(r"([?&])([\w.-]+)=([^&#\s'\"]+)")


def is_secret(key: str) -> bool:
    """Return whether the name of ``key`` indicates a secret."""
    return bool(_SECRET_KEY.search(key) or _TOKEN_KEY.search(key))


def holds_secret(key: str, value: Any) -> bool:
    """Return whether ``value`` must be masked. A number under a token key is a count, not a secret."""
    if value is None or isinstance(value, bool):
        return False
    return bool(_SECRET_KEY.search(key)) or (is_secret(key) and not isinstance(value, (int, float)))


def redact(value: Any) -> Any:
    """Return a copy of nested mappings and lists with secret values and passwords in URLs masked."""
    if isinstance(value, Mapping):
        return {k: MASK if holds_secret(str(k), v) else redact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(v) for v in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return ``text`` with the given secrets, and passwords in URLs, masked."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    text = _USERINFO.sub(rf"\1{MASK}@", text)
    return _QUERY_VALUE.sub(lambda m: f"{m[1]}{m[2]}={MASK}" if is_secret(m[2]) else m[0], text)


def secret_values(value: Any) -> tuple[str, ...]:
    """Return every secret of at least 4 characters in nested mappings and lists, longest first.

    They are to be masked in free text: shorter values would mask parts of ordinary words.
    """
    found = {s for s in _secrets(value, hidden=False) if len(s) >= 4}
    return tuple(sorted(found, key=len, reverse=True))


def _secrets(value: Any, *, hidden: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for k, v in value.items():
            yield from _secrets(v, hidden=hidden or holds_secret(str(k), v))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _secrets(v, hidden=hidden)
    elif hidden and not isinstance(value, bool) and value is not None:
        yield str(value)
