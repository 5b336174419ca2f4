"""``golden.says``: the texts of a test module in one file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.files import golden as texts
from helpers.files.golden import Golden, remove_old_texts

MODULE = "def test_b(golden):\n    ...\n\n\ndef test_a(n, golden):\n    ...\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(texts, "TESTS", tmp_path)
    monkeypatch.setattr(texts, "TEXTS", tmp_path / "golden/texts")
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit/test_it.py").write_text(MODULE)
    return tmp_path / "unit/test_it.py"


def item(module: Path, name: str) -> Any:
    return SimpleNamespace(path=module, name=name, funcargs={"tmp_path": "/tmp/x"}, fixturenames=["golden"])


def run(module: Path, name: str, *said: str, renew: bool = False) -> None:
    golden = Golden(item(module, name), renew=renew)
    for text in said:
        golden.says(text, RUN="/tmp/x/run-7", HOST="h")
    golden.end()


def text_of(module: Path) -> str:
    return (module.parents[1] / "golden/texts/unit/test_it.txt").read_text()


def test_texts_are_in_the_order_of_the_module_and_equal_ones_stand_once(module: Path) -> None:
    for number in (2, 1):
        run(module, f"test_a[{number}]", "RUN failed", renew=True)
    run(module, "test_b", "one\n\n## two  \n", "/tmp/x/run-7, /tmp/x and h", renew=True)
    assert text_of(module) == (
        "## test_b\none\n\n## two\n\n## test_b, 2\nRUN, TMP_PATH and HOST\n\n## test_a[1]\n## test_a[2]\nRUN failed\n"
    )
    run(module, "test_b", "one\n\n## two", "RUN, TMP_PATH and HOST")
    run(module, "test_a[2]", "RUN failed")


def test_another_text_and_another_number_of_texts_fail(module: Path) -> None:
    run(module, "test_b", "one", "two", renew=True)
    with pytest.raises(AssertionError, match=r"unit/test_it\.txt, test_b, 2\n(.*\n)+-two\n\+2\n.*--renew-golden FILE"):
        run(module, "test_b", "one", "2")
    for said in (["one"], ["one", "two", "three"]):
        with pytest.raises(AssertionError, match="--renew-golden FILE"):
            run(module, "test_b", *said)


def test_renewing_keeps_the_texts_of_tests_that_have_not_run(module: Path) -> None:
    run(module, "test_a[1]", "one", "two", renew=True)
    run(module, "test_a[2]", "one", renew=True)
    run(module, "test_a[1]", "1", renew=True)
    assert text_of(module) == "## test_a[1]\n1\n\n## test_a[2]\none\n"
    remove_old_texts([item(module, "test_a[2]"), item(module, "test_b")])
    assert text_of(module) == "## test_a[2]\none\n"
    remove_old_texts([item(module, "test_b")])
    assert not texts.TEXTS.joinpath("unit/test_it.txt").exists()
