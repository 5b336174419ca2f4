"""Values become the types of the fields of a dataclass, as a person's job may have them, or are refused."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any, Literal

import pytest

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


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("maybe", "x", "job.maybe=x: expected a whole number or null"),
        ("maybe", True, "job.maybe=true: expected a whole number or null"),
        ("either", [1], "job.either=[1]: expected a whole number or text"),
        ("choice", "c", "job.choice=c: expected a, b or 3"),
        ("choice", True, "job.choice=true: expected a, b or 3"),
        ("many", [1, "x"], "job.many=[1,x]: expected a list, each item a whole number"),
        ("many", 3, "job.many=3: expected a list, each item a whole number"),
        ("pair", [1], "job.pair=[1]: expected [a whole number, text]"),
        ("pair", [1, "x", 2], "job.pair=[1,x,2]: expected [a whole number, text]"),
        ("table", {"a": "x"}, "job.table={a:x}: expected a mapping"),
        ("inner", 3, "job.inner=3: expected a section with the keys a, b"),
        ("inner", {"a": 1, "c": 2}, "job.inner.c: unknown key; valid: job.inner.a, job.inner.b"),
        ("inner", {}, "job.inner.a: missing; give it a value"),
        ("inner", {"a": "x"}, "job.inner.a=x: expected a whole number"),
        ("inner", {"a": 13}, "job.inner: a=13 brings bad luck"),
        ("maybe_inner", {"a": "x"}, "job.maybe_inner.a=x: expected a whole number"),
        ("inners", [{"a": 1}, {"a": "x"}], "job.inners[1].a=x: expected a whole number"),
        ("colour", "green", "job.colour=green: expected red or blue"),
        ("where", True, "job.where=true: expected a path"),
        ("flag", "maybe", "job.flag=maybe: expected true or false"),
        ("computed", 3, "job.computed: unknown key; "),
    ],
)
def test_values_of_another_type_are_refused_in_plain_words(name: str, given: Any, said: str) -> None:
    errors = built(**{name: given})
    assert isinstance(errors, list), errors
    (error,) = errors
    assert error.startswith(said)


def test_several_errors_of_one_value_are_all_told() -> None:
    assert built(inner={"a": "x", "c": 1, "b": None}, whole=2.5, oter=1) == [
        "job.oter: unknown key; did you mean job.either?",
        "job.whole=2.5: expected a whole number",
        "job.inner.c: unknown key; valid: job.inner.a, job.inner.b",
        "job.inner.a=x: expected a whole number",
        "job.inner.b=null: expected a number",
    ]


def test_a_long_list_is_abridged() -> None:
    assert first_few([]) == ""
    assert first_few(["a", "b"], 2) == "a, b"
    assert first_few(["a", "b", "c"], 2) == "a, b, and 1 more"
    assert first_few(["a"] * 4, 1, separator="; ", noun="nodes") == "a; and 3 more nodes"
