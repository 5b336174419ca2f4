"""Texts that users see, compared with files in ``tests/golden`` that ``pytest --renew-golden`` writes."""

import ast
import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import pytest

TESTS = Path(__file__).parents[2]
GOLDEN = TESTS / "golden"
TEXTS = GOLDEN / "texts"
"""One file for each test module: what its tests pass to :meth:`Golden.says`."""
HEADING = re.compile(r"^## (test_.*?)(?:, (\d+))?\n", re.MULTILINE)
"""The name of a test with the id of its parameters, and the number of a text after the first. Several may precede one
text that they share."""

E = TypeVar("E", bound=BaseException)


@dataclass
class Golden:
    """The fixture ``golden``. Call it with ``<surface>/<name>``, written out, and a text without paths or times.

    Attributes:
        test: the test that uses it.
        renew: whether the files are written.
        said: the texts of this test so far, for the file of its module.
    """

    test: pytest.Item
    renew: bool
    said: list[str] = field(default_factory=list)

    def __call__(self, name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if self.renew:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        _compare(text, path.read_text(encoding="utf-8") if path.exists() else "", f"tests/golden/{name}.txt")

    def answers(self, name: str, answer: Callable[..., str]) -> None:
        """Compare a file with what is answered to the words of each of its headings. Renewing answers new ones."""
        lines = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        asked = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        assert asked
        self(name, sections({question: [answer(*shlex.split(question))] for question in asked}))

    def says(self, text: object, **names: object) -> None:
        """Compare a text with this test's next section in the file of its module.

        Args:
            text: a text, an error, or lines.
            names: what differs from run to run, such as a path, by the word that replaces it. ``tmp_path`` is replaced.
        """
        lines = [text] if isinstance(text, str) or not isinstance(text, Iterable) else text
        now = "\n".join(line.rstrip() for line in "\n".join(map(str, lines)).strip("\n").splitlines())
        replaced = {"TMP_PATH": self.test.funcargs.get("tmp_path", ""), **names}  # type: ignore[attr-defined]
        for word, value in sorted(replaced.items(), key=lambda item: -len(str(item[1]))):
            now = now.replace(str(value), word) if str(value) else now
        now = re.sub(r"\b(test_\w+\.py):\d+", r"\1:N", now)  # a line of a test, which every change above it moves
        assert now, "nothing is said"
        self.said.append(now)
        if not self.renew:
            key, path = (self.test.name, len(self.said)), texts_path(self.test.path)
            _compare(now, read_texts(path).get(key, ""), f"tests/{path.relative_to(TESTS)}, {_title(key)}")

    @contextmanager
    def raises(self, error: type[E] | tuple[type[E], ...], **names: object) -> Iterator[pytest.ExceptionInfo[E]]:
        """Like ``pytest.raises``, and then :meth:`says` with the error."""
        with pytest.raises(error) as raised:
            yield raised
        self.says(raised.value, **names)

    def end(self) -> None:
        """Compare the number of texts after the test has passed, or write the texts."""
        path = texts_path(self.test.path)
        texts = read_texts(path)
        before = {key for key in texts if key[0] == self.test.name}
        if self.renew and (before or self.said):
            said = {(self.test.name, number): text for number, text in enumerate(self.said, 1)}
            write_texts(path, self.test.path, {key: text for key, text in texts.items() if key not in before} | said)
        elif not self.renew:
            assert len(before) == len(self.said), f"tests/{path.relative_to(TESTS)}: number of texts; {_HOW_TO_RENEW}"


_HOW_TO_RENEW = "if this is intended: pytest --renew-golden FILE, then git diff"


def _compare(now: str, expected: str, name: str) -> None:
    lines = difflib.unified_diff(expected.splitlines(), now.splitlines(), name, "the text now", lineterm="")
    assert now == expected, "\n".join([*lines, _HOW_TO_RENEW])


def sections(texts: Mapping[str, list[str]]) -> str:
    """Several outputs in one file, each below what it shows."""
    return "\n\n".join("\n".join([f"## {title}", *lines]) for title, lines in texts.items())


def texts_path(module: Path) -> Path:
    return (TEXTS / module.relative_to(TESTS)).with_suffix(".txt")


Texts = dict[tuple[str, int], str]
"""By test and number, from 1."""


def read_texts(path: Path) -> Texts:
    if not path.exists():
        return {}
    _, *found = HEADING.split(path.read_text(encoding="utf-8"))
    texts, text = Texts(), ""
    for test, number, below in reversed([*zip(found[::3], found[1::3], found[2::3], strict=True)]):
        text = below.rstrip("\n") or text
        texts[test, int(number or 1)] = text
    return texts


def write_texts(path: Path, module: Path, texts: Texts) -> None:
    """In the order of the tests in their module, so that the order does not depend on which of them ran."""
    lines = functions_with_golden(module)
    ordered = sorted(texts, key=lambda key: (lines.get(function_of(key[0]), 0), *key))
    if ordered:
        path.parent.mkdir(parents=True, exist_ok=True)
        shared = groupby(ordered, key=lambda key: (function_of(key[0]), texts[key]))
        titles = {"\n## ".join(map(_title, keys)): [text] for (_, text), keys in shared}
        path.write_text(sections(titles) + "\n", encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


def remove_old_texts(items: Iterable[pytest.Item]) -> None:
    """Remove the texts of tests that no longer are in their modules.

    Args:
        items: all tests of these modules, also those that will not run.
    """
    tests: dict[Path, set[str]] = {}
    for item in items:
        names = tests.setdefault(item.path, set())
        if "golden" in getattr(item, "fixturenames", ()):
            names.add(item.name)
    for module, names in tests.items():
        if module.is_relative_to(TESTS) and (texts := read_texts(texts_path(module))):
            kept = {key: text for key, text in texts.items() if key[0] in names}
            write_texts(texts_path(module), module, kept)


def _title(key: tuple[str, int]) -> str:
    test, number = key
    return test if number == 1 else f"{test}, {number}"


def function_of(test: str) -> str:
    return test.partition("[")[0]


@cache
def functions_with_golden(module: Path) -> dict[str, int]:
    """The lines of the test functions of a module that use this fixture, by name."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name: f.lineno for f in functions if any(argument.arg == "golden" for argument in f.args.args)}
