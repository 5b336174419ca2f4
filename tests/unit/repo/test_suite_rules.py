"""What holds for the tests themselves."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from helpers.files.golden import GOLDEN, TEXTS, function_of, functions_with_golden, read_texts

TESTS = Path(__file__).resolve().parents[2]
MODULES = sorted(TESTS.glob("*/**/*.py"))


@pytest.mark.slow
def test_only_helpers_are_imported_by_other_modules() -> None:
    others = {module.stem for module in MODULES if module.parts[len(TESTS.parts)] != "helpers"}
    imported = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
        if name.split(".")[0] in others
    ]
    assert imported == [], "move what several modules share to tests/helpers"


def test_every_test_file_has_a_name_of_its_own() -> None:
    names = Counter(path.name for path in MODULES if path.name.startswith("test_"))
    assert [name for name, number in names.items() if number > 1] == [], "pytest cannot collect two files of one name"


def test_every_folder_has_its_place_in_the_order(pytestconfig: pytest.Config) -> None:
    (conftest,) = [p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "FOLDERS", None)]
    folders = {path.relative_to(TESTS).parts[0] for path in MODULES if path.name.startswith("test_")}
    assert folders <= set(conftest.FOLDERS), "enter the folder in FOLDERS of tests/conftest.py"


def test_every_test_on_a_gpu_says_what_it_shows_if_it_fails() -> None:
    """They run where nobody of the project is present."""
    silent = [
        node.name
        for path in (TESTS / "gpu").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not (ast.get_docstring(node) or "").startswith("If it fails, ")
    ]
    assert silent == []


def test_every_golden_file_is_read_by_one_test_and_exists() -> None:
    call = re.compile(r"\bgolden(?:\.answers)?\(\s*\"([^\"]+)\"")
    read = [name for path in MODULES for name in call.findall(path.read_text())]
    files = [path.relative_to(GOLDEN).with_suffix("").as_posix() for path in GOLDEN.rglob("*.txt")]
    files = [name for name in files if not name.startswith("texts/")]
    assert sorted(read) == sorted(files)


def test_every_golden_text_belongs_to_a_test() -> None:
    texts = {path.relative_to(TEXTS).with_suffix(".py"): read_texts(path) for path in TEXTS.rglob("*.txt")}
    missing = [str(module) for module in texts if not (TESTS / module).exists()]
    assert missing == [], "remove the texts of these modules"
    old = [
        f"{module}: {test}"
        for module, found in texts.items()
        for test, _ in found
        if function_of(test) not in functions_with_golden(TESTS / module)
    ]
    assert old == [], "pytest --renew-golden FILE removes the texts of tests that are gone"
