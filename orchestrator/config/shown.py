"""What ``--cfg`` and ``--info`` print of the files and keys that a command composes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.compat.hydra import write_yaml, yaml_value
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import composed_data
from orchestrator.config.redact import Redactor
from orchestrator.config.text import did_you_mean
from orchestrator.config.typed import Typed, merged


def config_text(words: Sequence[str], redactor: Redactor, *, kind: str, package: str | None, resolved: bool) -> str:
    """Return what ``words`` compose, as a file that may be put into ``conf/``.

    Args:
        words: options that choose files, and overrides.
        redactor: learns the secrets, and masks them.
        kind: one of :data:`~orchestrator.config.hydra_keys.KINDS`: our keys, those of Hydra, or both.
        package: the key of the section to return; None for everything.
        resolved: replace interpolations by their values.

    Raises:
        ConfigError: the words cannot be composed, or there is no such section.
    """
    data: Any = composed_data(words, kind, resolved=resolved)
    redactor.learn(data)
    data = merged(data, redactor.data(data), lambda value, masked: _written(value, masked, resolved=resolved))
    for name in [] if package in (None, "_global_") else str(package).split("."):
        if not isinstance(data, Mapping) or name not in data:
            hint = did_you_mean(name, data) if isinstance(data, Mapping) else "valid: none"
            raise ConfigError([f"--package={package}: no such section; {hint}"])
        data = data[name]
    if not isinstance(data, (dict, list)):
        return f"{data}\n"
    return f"# @package {package or '_global_'}\n{write_yaml(data, Typed)}"


def _written(value: Any, masked: Any, *, resolved: bool) -> Any:
    """Return a value for a file: typed text as it is if a file says the same with it."""
    if isinstance(value, Typed) and str(value) == masked:
        if isinstance(value.value, float) and not math.isfinite(value.value):
            return str(value)  # no field takes it as a number
        return value if yaml_value(str(value)) == value.value else value.value
    if resolved and isinstance(masked, str):
        return re.sub(r"(\\*)\$\{", lambda m: f"{m[1] * 2}\\${{", masked)
    return masked
