"""Values become the types of the fields of a dataclass, as a person's job may have them, or are refused."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from helpers.files.golden import Golden
from orchestrator.config.build import build
from orchestrator.config.text import first_few


class Colour(enum.Enum):
    red = 1
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
    computed: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(Outer):
    extra: str = ""


def built(**values: Any) -> Outer | list[str]:
    errors: list[str] = []
    made = build(Derived, values, "job", errors)
    return errors if made is None else made


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
