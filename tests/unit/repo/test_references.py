"""The reference pages of the documentation, which are made from the code, leave nothing out."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

import orchestrator
from helpers.files.documents import PAGES
from orchestrator.config.files import choices, conf_dir, shipped_dirs
from orchestrator.protocol.events import Event

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "docs"))

import references  # noqa: E402

MEANINGS = references.MEANINGS

METRIC = re.compile(r"(train|val|perf|memory|pipeline|parameter_server|async|hogwild|dp|recovery)/[\w<>]*[a-z\d>]")


NAMED = re.compile(
    r"(?<![\w./-])((?:train|strategy|checkpoint|recovery|data|tracking|storage|cluster|sweep)\.(?!md|py|npy|txt|bin)\w+)"
    r"(?![\w/(.])"
)
KEYS = references.keys()


def headings(text: str) -> set[str]:
    return set(re.findall(r"^##+ (.+)$", text, re.M))


def test_the_pages_in_the_repository_have_the_references() -> None:
    outdated = [path.name for path, text in references.pages().items() if path.read_text() != text]
    assert not outdated, "run python docs/references.py"


def test_every_key_of_the_configuration_files_is_in_the_reference() -> None:
    defaults = yaml.safe_load((conf_dir() / "config.yaml").read_text())
    keys = {f"{section}.{key}" for section, values in defaults.items() if isinstance(values, dict) for key in values}
    for group in ("cluster", "tracking", "strategy", "mesh"):
        for path in (path for directory in shipped_dirs() for path in (directory / group).glob("*.yaml")):
            keys |= {f"{group.replace('mesh', 'strategy')}.{key}" for key in yaml.safe_load(path.read_text())}
    keys = {key for key in keys if not re.match(r"hydra\.|\w+\.(defaults|name|fixed)$", key)}
    assert len(keys) > 100
    assert {key for key in keys if f"| `{key}` |" not in KEYS} == set()
    groups = {f"{group}={name}" for group in ("strategy", "job") for name in choices(group)}
    assert groups <= headings(KEYS)


def test_every_key_that_a_page_names_exists() -> None:
    known = set(re.findall(r"^\| `(\w+\.\w+)` \|", KEYS, re.M))
    named = {key for page in PAGES for key in NAMED.findall(page.read_text())}
    assert named - known == {"train.stps", "strategy.chosen_by"}  # a typing error to show, and a tag


def test_everything_public_is_in_the_reference_of_python() -> None:
    members = {f"Job.{name}" for name in vars(orchestrator.Job) if not name.startswith("_")}
    names = {f"orchestrator.{name}" for name in orchestrator.__all__ if name != "__version__"}
    assert names | members <= headings(references.python())


def test_every_event_is_in_the_reference() -> None:
    kinds = {cls(**dict.fromkeys(cls.__dataclass_fields__)).kind for cls in subclasses(Event)}  # type: ignore[arg-type]
    assert kinds - {"worker_failure"} == headings(references.event_reference())


def subclasses(cls: type[Event]) -> Iterator[type[Event]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_every_metric_in_the_code_has_a_meaning_and_no_other_has() -> None:
    """A name that is put together has ``<x>`` for what it is put together of."""
    found = {name for path in (ROOT / "orchestrator").rglob("*.py") for name in metric_names(path)}
    known = {name for section in MEANINGS.values() for name in section}
    assert {name for name in found if not any(same(name, other) for other in known)} == set()
    measured = {name for name in known if METRIC.fullmatch(name)}
    assert {name for name in measured if not any(same(other, name) for other in found)} == set()


def metric_names(path: Path) -> Iterator[str]:
    if path.name == "metric_meanings.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Constant(value=str(text)):
                parts = text
            case ast.JoinedStr(values=values):
                parts = "".join(str(v.value) if isinstance(v, ast.Constant) else "<x>" for v in values)
            case _:
                continue
        if METRIC.fullmatch(parts):
            yield parts


def same(found: str, known: str) -> bool:
    literal = re.sub(r"<\w+>", "<x>", known)
    return literal == found or re.fullmatch(found.replace("<x>", ".+"), literal) is not None
