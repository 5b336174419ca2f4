"""What a probe is, and how it is run: in a process of its own, with a limit."""

from __future__ import annotations

import importlib
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.arms import kill_tree

Outcome = Literal["ok", "FAIL", "not run"]
MIN_S = 10.0
"""A probe that has less time than this is not started."""
CODES: Mapping[int, Outcome] = {0: "ok", 1: "FAIL", 2: "not run"}
"""The exit codes of a process that asks a probe."""


class ProbeError(Exception):
    """The answer to a probe's question is no; the text has what was found."""


class NotHereError(Exception):
    """This machine cannot answer the question, because of what the text says."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A question to a GPU.

    Attributes:
        question: as the table shows it.
        function: ``module.name`` in this package. It takes ``on_cpu`` and the ``arguments`` and returns what it has
            found, or raises :class:`ProbeError` or :class:`NotHereError`.
        limit_s: how long it may take.
    """

    question: str
    function: str
    limit_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., str]:
        """Import the function. Not earlier: the ranks of a probe need little of what others import."""
        module, _, name = self.function.partition(".")
        function: Callable[..., str] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return function


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a probe, which took so many ``seconds``."""

    outcome: Outcome
    text: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.outcome}: {self.text} [{self.seconds:.0f} s]"


def answer(probe: Probe, *, on_cpu: bool, file: Path) -> int:
    """Ask a probe in this process, write what it has found to ``file``, and return the exit code for it."""
    try:
        text, code = probe.load()(on_cpu=on_cpu, **probe.arguments), 0
    except NotHereError as e:
        text, code = str(e), 2
    except ProbeError as e:
        text, code = str(e), 1
    except (Exception, SystemExit) as e:
        traceback.print_exc()
        text, code = f"{type(e).__name__}: {_short(str(e))}", 1
    file.write_text(text)
    return code


def judge(command: Sequence[str], *, limit_s: float, left_s: float, log: Path, file: Path) -> Verdict:
    """Run a command that asks a probe, and kill it and what it has started if it takes too long.

    Args:
        command: writes what it has found to ``file``, and exits with one of ``CODES``.
        limit_s: how long it may take.
        left_s: how long there is time; a probe that needs more than that, and less than ``limit_s``, is "not run".
        log: receives its output.
        file: see ``command``.
    """
    if min(limit_s, left_s) < MIN_S:
        return Verdict(outcome="not run", text="no time left")
    began = time.monotonic()
    code = None
    with log.open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(min(limit_s, left_s))
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_tree(process)
    seconds = time.monotonic() - began
    if code is None and left_s < limit_s:
        return Verdict(outcome="not run", text=f"cut after {left_s:.0f} s, no time left", seconds=seconds)
    if code in CODES and file.is_file():
        return Verdict(outcome=CODES[code], text=file.read_text(), seconds=seconds)
    how = f"no answer within {limit_s:.0f} s" if code is None else f"exited with {code} without an answer"
    said = log.read_text(errors="replace").strip().splitlines()
    return Verdict(outcome="FAIL", text=f"{how}: {_short(said[-1]) if said else 'no output'}", seconds=seconds)


def _short(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
