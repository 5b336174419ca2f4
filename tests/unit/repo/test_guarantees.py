"""What docs/guarantees.md says about the tests that it names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from helpers.faults.table import ROWS

ROOT = Path(__file__).resolve().parents[3]
CITATION = re.compile(r"`(tests/[^`:]+)(?:::(\w+)(?:\[(.+?)\])?)?`(?: \(([^)]*)\))?")


class Citation(NamedTuple):
    """A test file, one test of it or one case of that test, and the remark behind it in parentheses."""

    file: str
    test: str
    case: str
    remark: str


CITATIONS = [Citation(*found) for found in CITATION.findall((ROOT / "docs" / "guarantees.md").read_text())]


def is_campaign(cited: Citation) -> Iterator[bool]:
    """Whether only ``pytest -m campaign`` runs a case, for the cases that are cited."""
    for node in ast.parse((ROOT / cited.file).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and cited.test in ("", node.name):
            cases = dict(cases_of(node))
            if "pytest.mark.campaign" in map(ast.unparse, node.decorator_list):
                yield True
            elif cited.case:
                yield cases[cited.case]
            else:
                yield from cases.values() or [False]


def cases_of(test: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """The cases in each ``parametrize``, by a name such as pytest's, and whether they belong to the campaign."""
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize":
            values = decorator.args[1]
            if ast.unparse(values).endswith(" for row in ROWS]"):
                yield from ((str(row), row.tier == "") for row in ROWS)
            for value in values.elts if isinstance(values, ast.List) else []:
                if isinstance(value, ast.Starred) and isinstance(value.value, ast.Call):
                    yield from ((name_of(argument), True) for argument in value.value.args)
                else:
                    yield name_of(value), "pytest.mark.campaign" in ast.unparse(value)


def name_of(case: ast.expr) -> str:
    match case:
        case ast.Tuple(elts=parts) | ast.Call(args=parts):
            return "-".join(map(name_of, parts))
        case ast.Constant(value=value):
            return str(value)
        case _:
            return ast.unparse(case)


def test_a_guarantee_says_whether_its_test_belongs_to_the_campaign() -> None:
    assert list(filter(None, map(wrong, sorted(set(CITATIONS))))) == []


def wrong(cited: Citation) -> str | None:
    tiers, name = set(is_campaign(cited)), "::".join(filter(None, cited[:3]))
    if not tiers:
        return f"{name}: there is no such test"
    if len(tiers) > 1:
        return f"{name}: CI runs a part of it: name the test, as file::test, or the case, as file::test[case]"
    return None if tiers == {"campaign" in cited.remark} else f"{name}: (campaign) is missing, or too much"
