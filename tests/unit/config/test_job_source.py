"""The fields of a job in its source, without an import."""

import sys
from pathlib import Path

import pytest

from orchestrator.config.job_source import fields_in_source, source_errors
from orchestrator.config.schema import JobSpec

HEAD = "from dataclasses import dataclass\nfrom typing import ClassVar\nfrom orchestrator import Job\nimport other\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@dataclass(frozen=True)\nclass A(Job):\n    x: int = 1\n    kind: ClassVar[str] = ''\n", {"x"}),
        ("@dataclass\nclass B(Job):\n    x: int\n\n\n@dataclass\nclass A(B):\n    y: int\n", {"x", "y"}),
        ("@dataclass\nclass A(other.Base):\n    x: int\n", None),
        ("@dataclass\nclass A(A):\n    x: int\n", None),
        ("@other.fields\nclass A(Job):\n    x: int\n", None),
        ("class A(Job):\n    x: int\n", None),
        ("if True:\n    class A(Job): pass\n", None),
        ("def (", None),
    ],
)
def test_fields_are_read_where_one_file_tells_all(
    source: str, expected: set[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "pack" / "mine.py").write_text(HEAD + source)
    found = fields_in_source("pack.mine.A")
    assert (None if found is None else {*found}) == expected
    assert "pack" not in sys.modules


def test_a_field_that_is_not_there_is_named() -> None:
    spec = JobSpec(target="jobs.digits.Digits", fields={"hiden": 3, "hidden": 4})
    assert source_errors(spec) == ["job.hiden: unknown key; did you mean job.hidden?"]
    assert source_errors(JobSpec(target="pytest.no_such.Job", fields={"x": 1})) == []
