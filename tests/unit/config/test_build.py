"""Values become the types of the fields of a dataclass, as a person's job may have them, or are refused."""

import dataclasses
import enum
import pickle
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from omegaconf import OmegaConf

from helpers.files.golden import Golden
from orchestrator.config.build import build
from orchestrator.config.overrides import parse, value_of
from orchestrator.config.text import first_few
from orchestrator.config.typed import Typed, mark, plain, unmark


class Colour(enum.Enum):
    red = 1
    grey = "1.10"
    blue = "azure"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    a: int
    b: float = 0.5

    def __post_init__(self) -> None:
        if self.a == 13:
            raise ValueError("a=13 brings bad luck")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    whole: int = 1
    maybe: int | None = None
    either: int | str = 0
    choice: Literal["a", "b", 3] = "a"
    many: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    listed: list[float] = dataclasses.field(default_factory=list)
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    inner: Inner = Inner(a=0)
    maybe_inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    colour: Colour = Colour.red
    where: Path = Path()
    maybe_where: Path | None = None
    anything: Any = None
    flag: bool = False
    version: Literal["1.1", "1.10", "null"] = "1.1"
    text: str = ""
    maybe_text: str | None = None
    sloppy: str = None  # type: ignore[assignment]
    number_or_text: str | float = ""
    texts: tuple[str, ...] = ()
    texts_or_text: list[str] | str = ""
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    numbered: dict[int, str] = dataclasses.field(default_factory=dict)
    computed: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(Outer):
    extra: str = ""


def built(**values: Any) -> Outer | list[str]:
    errors: list[str] = []
    made = build(Derived, values, "job", errors)
    return errors if made is None else made


def read(*words: str) -> Outer | list[str]:
    """Return the job that overrides make, without the files of the configuration."""
    errors: list[str] = []
    composed = OmegaConf.create({})
    for override in parse(words, errors):
        OmegaConf.update(composed, override.key_or_group, mark(value_of(override)), force_add=True)
    return errors or built(**unmark(OmegaConf.to_container(composed, resolve=True))["job"])


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("maybe", None, None),
        ("maybe", 3, 3),
        ("either", 3, 3),
        ("either", "3", "3"),
        ("choice", 3, 3),
        ("choice", "b", "b"),
        ("many", [1, 2], (1, 2)),
        ("pair", [1, "x"], (1, "x")),
        ("listed", [1, 2.5], [1.0, 2.5]),
        ("table", {"a": 1}, {"a": 1}),
        ("inner", {"a": 2}, Inner(a=2)),
        ("maybe_inner", {"a": 2, "b": 1}, Inner(a=2, b=1.0)),
        ("maybe_inner", None, None),
        ("inners", [{"a": 1}, {"a": 2}], (Inner(a=1), Inner(a=2))),
        ("colour", "blue", Colour.blue),
        ("colour", "azure", Colour.blue),
        ("colour", 1, Colour.red),
        ("where", "a/b", Path("a/b")),
        ("maybe_where", "a/b", Path("a/b")),
        ("maybe_where", None, None),
        ("anything", {"x": [1]}, {"x": [1]}),
        ("extra", 5, "5"),
        ("flag", True, True),
    ],
)
def test_values_become_the_type_of_their_field(name: str, given: Any, expected: Any) -> None:
    made = built(**{name: given})
    assert not isinstance(made, list), made
    value = getattr(made, name)
    assert value == expected
    assert type(value) is type(expected)


TEXTS = [
    *("1.10", "1_1_1", "1e5", "1e", "+5", "-0", "0x10", "0o7", "1:30", "007", "1.0", ".5", "1.", "1.2.3", "2026-01-02"),
    *("yes", "on", "off", "true", "True", "FALSE", "nan", "inf", "~", "~/x", "é", "it's", "5%", "a=b", "a:b"),
    *("#x", "a;b"),
    *("!x", "<a>", "^", "a(b)", "\\d", "C:\\x", "a\\", " a ", " 1.10", "  "),
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_field_gets_what_was_typed(text: str) -> None:
    made = read(f"job.text={text}", f"job.maybe_text={text}", f"job.sloppy={text}", f"job.texts_or_text={text}")
    assert made == Derived(text=text, maybe_text=text, sloppy=text, texts_or_text=text)
    assert {type(getattr(made, name)) for name in ("text", "maybe_text", "sloppy", "texts_or_text")} == {str}
    assert read(f"job.where={text}") == Derived(where=Path(text))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("version=1.10", {"version": "1.10"}),
        ("version=null", {"version": "null"}),
        ("colour=1.10", {"colour": Colour.grey}),
        ("colour=1", {"colour": Colour.red}),
        ("texts=[1.10,1_0,007,+5,yes,true,'1.10']", {"texts": ("1.10", "1_0", "007", "+5", "yes", "true", "1.10")}),
        ("texts_or_text=[1.10,2]", {"texts_or_text": ["1.10", "2"]}),
        ("names={1.10: 1_1, 007: 1e5, a: true}", {"names": {"1.10": "1_1", "007": "1e5", "a": "true"}}),
        ("names.x=1.10", {"names": {"x": "1.10"}}),
        ("numbered={1: 1.10}", {"numbered": {1: "1.10"}}),
        ("inners=[{a: 1, b: 2.50}]", {"inners": (Inner(a=1, b=2.5),)}),
        ("pair=[1,1.10]", {"pair": (1, "1.10")}),
        ("either=1_0", {"either": 10}),
        ("either=1.10", {"either": "1.10"}),
        ("number_or_text=3", {"number_or_text": 3.0}),
        ("number_or_text=1.10.2", {"number_or_text": "1.10.2"}),
        ("maybe_text=null", {"maybe_text": None}),
        ("sloppy=null", {"sloppy": None}),
        ("anything={1: [1.10, true, null]}", {"anything": {1: [1.1, True, None]}}),
        ("text=v-${job.names.a}-1.10", {"text": "v-1_0-1.10"}),
        ("text=${job.names.a}", {"text": "1_0"}),
        ("listed=['1.5']", None),
        ("text=null", None),
    ],
)
def test_each_part_of_a_value_gets_what_was_typed(word: str, expected: dict[str, Any] | None) -> None:
    words = [f"job.{word}", *(["job.names.a=1_0"] if "${" in word else [])]
    made = read(*words)
    if expected is None:
        assert isinstance(made, list)
        assert len(made) == 1
    else:
        other: dict[str, Any] = {"names": {"a": "1_0"}} if "${" in word else {}
        assert made == Derived(**expected, **other)


def test_a_value_keeps_its_text_on_its_way_to_other_processes() -> None:
    value = pickle.loads(pickle.dumps(Typed("1.10", 1.1)))
    assert (str(value), plain([value])) == ("1.10", [1.1])


def test_values_of_another_type_are_refused_in_plain_words(golden: Golden) -> None:
    """All errors of one value are said at once."""

    def errors(*words: str) -> str:
        found = built(**{name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)})
        assert isinstance(found, list), found
        return "\n".join(found)

    golden.answers("errors/values", errors)


def test_a_long_list_is_abridged() -> None:
    assert first_few([]) == ""
    assert first_few(["a", "b"], 2) == "a, b"
    assert first_few(["a", "b", "c"], 2) == "a, b, and 1 more"
    assert first_few(["a"] * 4, 1, separator="; ", noun="nodes") == "a; and 3 more nodes"
