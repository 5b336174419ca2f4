"""The configuration of ``strategy=script``, and its job: which script runs, with which arguments. Without torch."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.job import Job
from orchestrator.user_code.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Script(Job):
    """A program that runs under torchrun, such as ``train.py``.

    Attributes:
        script: the Python file to run, or what ``kind`` says. A relative path begins at the working directory.
        args: its arguments, as a shell reads them.
        kind: whether ``script`` is a ``file`` or a ``module`` for Python, or a ``program`` of another kind.
    """

    script: str
    args: str = ""
    kind: str = "file"

    def check(self) -> None:
        """Check that there is such a script, and that Python can compile it."""
        if self.kind not in ("file", "module", "program"):
            raise ValueError(f"job.kind={self.kind}: expected file, module or program")
        try:
            shlex.split(self.args)
        except ValueError as e:
            raise ValueError(f"job.args={self.args}: a shell could not read it: {str(e).lower()}") from e
        if self.kind == "file":
            _check_file(Path(self.script))

    def arguments(self) -> dict[str, str]:
        """Return its arguments by name, as most programs read them: ``--lr 0.003`` and ``--lr=0.003`` are ``lr``.

        Several values of an option are one text, an option without any is ``true``, and words before the first option
        are left out.
        """
        found: dict[str, list[str]] = {}
        name = None
        for word in shlex.split(self.args):
            if (given := re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)) is not None:
                name = given[1].replace("-", "_")
                found[name] = [] if given[2] is None else [given[2]]
            elif (given := re.fullmatch(r"\+*([A-Za-z][\w.]*)=(.*)", word, re.DOTALL)) is not None:  # as for Hydra
                found[given[1]] = [given[2]]
                name = None
            elif name is not None:
                found[name].append(word)
        return {key: " ".join(values) or "true" for key, values in found.items()}

    def command(self, python: str) -> Sequence[str]:
        """Return the program and its arguments; ``python``: the interpreter."""
        before = {"file": [python], "module": [python, "-m"], "program": []}[self.kind]
        return [*before, self.script, *shlex.split(self.args)]

    def model(self) -> NoReturn:
        raise JobError("job=script: only strategy=script runs it; leave out job, or choose strategy=script")

    def dataset(self, split: str) -> NoReturn:
        self.model()

    def loss(self, output: Any, target: Any) -> NoReturn:
        self.model()

    def optimizer(self, parameters: Any) -> NoReturn:
        self.model()


def _check_file(path: Path) -> None:
    key = f"job.script={path}"
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "no such file"
        raise ValueError(f"{key}: {what}; give the path of a Python file, relative to the working directory")
    if path.suffix != ".py":
        raise ValueError(f"{key}: no Python file (.py); a program of another kind needs job.kind=program")
    try:
        ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as e:
        line = f", line {e.lineno}" if isinstance(e, SyntaxError) and e.lineno else ""
        raise ValueError(f"{key}{line}: Python cannot compile it: {e.msg if isinstance(e, SyntaxError) else e}") from e
