"""The examples and commands of the Markdown files.

An example is a block of Python. It runs as a module of its own. A comment in the line before the block changes that:

- ``<!-- example in NAME -->``: the block takes the place of the line ``# the example`` in ``helpers/examples/NAME.py``;
- ``<!-- not run: REASON -->``.
"""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "cluster/README.md")
PAGES = tuple(page for page in FILES if "<!-- made from the code" not in page.read_text())
SETTINGS = Path(__file__).with_name("examples")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<how>example in|not run:) (?P<what>[^\n]+) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S
)
_PLACE = re.compile(r"^(?P<indent> *)# the example$", re.M)
_FILE = re.compile(r'^```yaml title="([^"]+)"\n(.*?)^```$', re.M | re.S)
_LAUNCH = re.compile(
    r"^    (?:python -m orchestrator\.launch|orchestrator (?:launch|submit))(?: (?P<words>.*))?$", re.M
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """``where``: file and line. ``not_run``: why it is not run; None if it is. ``source``: the module to run."""

    where: str
    not_run: str | None
    source: str


def examples(page: Path) -> list[Example]:
    text = page.read_text()
    return [
        Example(
            where=f"{page.relative_to(ROOT)}:{text[: block.start('code')].count(chr(10)) + 1}",
            not_run=block["what"] if block["how"] == "not run:" else None,
            source=_placed(block["code"], block["what"]) if block["how"] == "example in" else block["code"],
        )
        for block in _BLOCK.finditer(text)
    ]


def files(page: Path) -> dict[str, str]:
    """The files that the reader of a page writes: the text of each by its path."""
    return dict(_FILE.findall(page.read_text()))


def launches(page: Path) -> list[list[str]]:
    """The words of each command of its own line that starts a run, without those that are left to the reader."""
    text = re.sub(r" *\\\n *", " ", page.read_text())
    found = (shlex.split(match["words"] or "", comments=True) for match in _LAUNCH.finditer(text))
    return [words for words in found if not any(re.search(r"<|\.\.\.|--attach", word) for word in words)]


def _placed(code: str, setting: str) -> str:
    template = (SETTINGS / f"{setting}.py").read_text()
    place = _PLACE.search(template)
    assert place is not None, f"{setting}.py has no line '# the example'"
    example = textwrap.indent(textwrap.dedent(code), place["indent"])
    return template[: place.start()] + example + template[place.end() :]
