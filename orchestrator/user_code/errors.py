"""Errors in what the user has given; their text alone says what to change."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """The configuration or the plan is wrong. ``errors`` holds one line per error, duplicates removed."""

    def __init__(self, errors: Iterable[str]):
        self.errors = tuple(dict.fromkeys(errors))
        super().__init__(self.errors)

    def __str__(self) -> str:
        return "\n".join(self.errors)


class JobError(ConfigError):
    """The code of the job does what it must not."""

    def __init__(self, error: str):
        super().__init__([error])
        self.args = (error,)  # as pickle calls the class
