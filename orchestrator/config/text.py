"""Keys, values and names in messages: as typed on the command line, masked, abridged, or with the closest match."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.config.redact import MASK, holds_secret, redact


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return ``did you mean x?`` with the closest known name, or the list of valid names if none is close.

    ``prefix`` is put before each name.
    """
    names = sorted(known)
    closest = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if closest:
        return f"did you mean {prefix}{closest[0]}?"
    return f"valid: {', '.join(prefix + n for n in names) or 'none'}"


def format_override(key: str, value: Any) -> str:
    """Return ``key=value`` as typed on the command line, with secret values masked."""
    return f"{key}={MASK if holds_secret(key, value) else to_cli(redact(value))}"


def to_cli(value: Any) -> str:
    """Return the value as typed on the command line: ``null``, ``true``, ``[a,b]``, ``{key:value}``."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{to_cli(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(to_cli, value)) + "]"
    return str(value)


def path_override(key: str, path: str) -> str:
    """Return the override that sets ``key`` to a path or a URL of any characters."""
    if "/" in path and re.fullmatch(r"[\w./:@%+-]+", path):
        return f"{key}={path}"
    from orchestrator.compat.hydra import quote_text  # imports Hydra, which takes a second

    return f"{key}={quote_text(path)}"


def first_few(items: Sequence[str], most: int = 8, *, separator: str = ", ", noun: str = "") -> str:
    """Return the first ``most`` items and the number of the others, as in ``a, b, and 3 more nodes``.

    ``noun``: what the others are; empty if the context says it.
    """
    rest = len(items) - most
    more = [f"and {rest} more {noun}".rstrip()] if rest > 0 else []
    return separator.join([*items[:most], *more])


def plain(text: str) -> str:
    """Return Markdown that shows ``text`` as it is, also in a cell of a table."""
    return re.sub(r"[\\`*\[\]<|&]", r"\\\g<0>", text)


def code(text: str) -> str:
    """Return Markdown that shows the line ``text`` as code."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{text}{space}{fence}"


_MOST_CHARACTERS = 80
"""The length of the settings of a run; MLflow's pages and the legends of plots show no more."""
_MOST_KEYS = 4
_TELL_NOTHING = frozenset(
    {"name", "resume", "output_dir", "plan", "debug", "profile", "train.log_every", "train.eval_every", "train.check"}
)
_SECTIONS_THAT_TELL_NOTHING = ("checkpoint", "tracking", "display", "storage", "cluster", "recovery", "hydra")


def settings_of(overrides: Sequence[str], *, told_by_name: Sequence[str]) -> str:
    """Return overrides with short keys where these are unique: ``lr=0.1 hidden=32``.

    ``told_by_name``: the keys that the name of a run has.
    """
    given = [o.strip("'\"").lstrip("+~").partition("=") for o in overrides]
    own = {key: value for key, _, value in given if key not in told_by_name}
    ends = [key.rpartition(".")[2] for key in own]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(own, ends, strict=True)}
    text = " ".join(f"{short[key]}={value}" for key, value in own.items())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def settings_of_run(overrides: Sequence[str]) -> str:
    """Return the first settings of a run outside of sweeps that change results, fields of the job before others.

    ``overrides``: with secrets masked; options among them are left out.
    """
    if any(word.startswith("evaluate=") for word in overrides):
        return ""  # an evaluation repeats the settings of a run
    told = {key: word for word in overrides if (key := _telling_key(word)) is not None}
    is_named = any(word.startswith("name=") for word in overrides)
    names = ("job", "strategy") if not is_named else ()
    own = [word for key, word in sorted(told.items(), key=_is_of_loop) if key not in names]
    text = settings_of(own[:_MOST_KEYS], told_by_name=())
    return text if len(own) <= _MOST_KEYS or text.endswith("...") else f"{text} ..."


def _is_of_loop(told: tuple[str, str]) -> bool:
    return not told[0].startswith("job.")


def _telling_key(word: str) -> str | None:
    """The key of an override that changes results; None for another word."""
    key, equals, _ = word.strip("'\"").lstrip("+").partition("=")
    is_other = not equals or word.startswith(("-", "~")) or key in _TELL_NOTHING
    return None if is_other or key.partition(".")[0] in _SECTIONS_THAT_TELL_NOTHING else key
