"""Texts that users see, compared with files in ``tests/golden`` that ``pytest --renew-golden`` writes."""

import difflib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "golden"


@dataclass(frozen=True)
class Golden:
    """The fixture ``golden``. Call it with ``<surface>/<name>``, written out, and a text without paths or times."""

    renew: bool

    def __call__(self, name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if self.renew:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        names = (f"tests/golden/{name}.txt", "the text now")
        difference = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), *names, lineterm=""))
        assert text == expected, f"{difference}\nIf this is intended: pytest --renew-golden FILE, then git diff"

    def answers(self, name: str, answer: Callable[..., str]) -> None:
        """Compare a file with what is answered to the words of each of its headings. Renewing answers new ones."""
        lines = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        asked = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        assert asked
        self(name, sections({question: [answer(*shlex.split(question))] for question in asked}))


def sections(texts: Mapping[str, list[str]]) -> str:
    """Several outputs in one file, each below what it shows."""
    return "\n\n".join("\n".join([f"## {title}", *lines]) for title, lines in texts.items())
