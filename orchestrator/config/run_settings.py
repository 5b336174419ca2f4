"""What tells a run from others, in a few words for its name on a tracking server."""

from __future__ import annotations

from collections.abc import Sequence

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
    told = {key: word for word in overrides if (key := _key(word)) is not None}
    is_named = any(word.startswith("name=") for word in overrides)
    names = ("job", "strategy") if not is_named else ()
    own = [word for key, word in sorted(told.items(), key=_is_of_loop) if key not in names]
    text = settings_of(own[:_MOST_KEYS], told_by_name=())
    return text if len(own) <= _MOST_KEYS or text.endswith("...") else f"{text} ..."


def _is_of_loop(told: tuple[str, str]) -> bool:
    return not told[0].startswith("job.")


def _key(word: str) -> str | None:
    """The key of an override that changes results; None for another word."""
    key, equals, _ = word.strip("'\"").lstrip("+").partition("=")
    is_other = not equals or word.startswith(("-", "~")) or key in _TELL_NOTHING
    return None if is_other or key.partition(".")[0] in _SECTIONS_THAT_TELL_NOTHING else key
