"""Finding a person's job: from anywhere, typed by its own fields, refused in plain words."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.files.golden import Golden
from orchestrator.config.job_loader import load_job
from orchestrator.config.schema import JobSpec
from orchestrator.job import Job

METHODS = """
    def model(self): ...
    def dataset(self, split): ...
    def loss(self, output, target): ...
    def optimizer(self, parameters): ...
"""

MODULES = {
    "plain": """
        @dataclass(frozen=True, kw_only=True)
        class Mine(Job):
            width: int = 8
            mode: Literal["a", "b"] = "a"
            path: Path | None = None
            METHODS
            def check(self):
                if self.width > 100:
                    raise ValueError(f"job.width={self.width}: must be at most 100")
                if self.width == 50:
                    raise OSError("no such disk")
                if self.width == 40:
                    warnings.warn("job.width=40: is slow")
                    warnings.warn("of a library")

        @dataclass(frozen=True, kw_only=True)
        class Wider(Mine):
            extra: float
        """,
    "no_fields": """
        class Mine(Job):
            METHODS
        """,
    "undecorated": """
        class Mine(Job):
            width: int = 8
            METHODS
        """,
    "post_init": """
        @dataclass(frozen=True, kw_only=True)
        class Mine(Job):
            a: int = 1
            METHODS
            def __post_init__(self):
                raise ValueError("a and b do not go together")
        """,
    "incomplete": """
        @dataclass(frozen=True, kw_only=True)
        class Mine(Job):
            def model(self): ...
            def dataset(self, split): ...
        """,
    "lazy_types": """
        if TYPE_CHECKING:
            from somewhere import Thing

        @dataclass(frozen=True, kw_only=True)
        class Mine(Job):
            a: Thing = None
            METHODS
        """,
    "broken": "this is no python",
    "raising": "raise KeyError('surprise')",
    "leaving": "import sys; sys.exit(3)",
    "interrupting": "raise KeyboardInterrupt",
    "checked": """
        @dataclass(frozen=True, kw_only=True)
        class Mine(Job):
            how: str
            METHODS
            def check(self):
                return sys.exit(0) if self.how == "exit" else exec(self.how)

        class Refusing(Mine):
            def check(self):
                return self.how == "well"
        """,
    "made": """
        def leave():
            sys.exit(1)

        @dataclass(frozen=True, kw_only=True)
        class Mine(Job):
            a: int = field(default_factory=leave)
            METHODS

        @dataclass(frozen=True, kw_only=True)
        class Other(Job):
            METHODS
            def __post_init__(self):
                raise SystemExit
        """,
    "kinds": """
        @dataclass(frozen=True, kw_only=True)
        class Mine(Job):
            split_names = "train"
            METHODS
            @property
            def scheduler(self):
                return None
            def tokens_per_sample(self):
                return 3
        """,
    "needy": "import not_installed_anywhere",
}

HEAD = """
from __future__ import annotations
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from orchestrator import Job
"""

Load = Callable[..., "Job | list[str]"]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a class of ``MODULES``, whose files lie in a directory of their own on the path."""
    package = f"jobs_of_{tmp_path.name}"
    (tmp_path / package).mkdir()
    for name, source in MODULES.items():
        body = textwrap.dedent(source).replace("    METHODS", METHODS.strip("\n"))
        (tmp_path / package / f"{name}.py").write_text(HEAD + body)
    monkeypatch.syspath_prepend(tmp_path)

    def load(target: str, noticed: list[str] | None = None, **fields: Any) -> Job | list[str]:
        errors: list[str] = []
        job = load_job(JobSpec(target=f"{package}.{target}", fields=fields), errors, noticed=noticed)
        assert (job is None) == bool(errors)
        return [e.replace(f"{package}.", "").replace(package, "a_package") for e in errors] if job is None else job

    return load


def test_fields_are_typed_by_the_class(load: Load) -> None:
    job: Any = load("plain.Mine", width=3, mode="b", path="a/b")
    assert (job.width, job.mode, job.path) == (3, "b", Path("a/b"))


def test_fields_are_inherited(load: Load) -> None:
    job: Any = load("plain.Wider", width=3, extra=1)
    assert (job.width, job.extra) == (3, 1.0)


def test_warnings_of_a_check_that_name_a_field_are_collected(load: Load) -> None:
    noticed: list[str] = []
    with pytest.warns(UserWarning, match="of a library") as others:
        assert isinstance(load("plain.Mine", noticed, width=40), Job)
    assert (noticed, len(others)) == (["job.width=40: is slow"], 1)
    with pytest.warns(UserWarning, match="is slow"):
        load("plain.Mine", width=40)


def test_a_job_without_fields_needs_no_decorator(load: Load) -> None:
    assert isinstance(load("no_fields.Mine"), Job)


def test_a_job_that_cannot_be_is_refused_in_plain_words(load: Load, golden: Golden) -> None:
    def errors(target: str, *fields: str) -> str:
        found = load(target, **{name: yaml.safe_load(value) for name, _, value in (f.partition("=") for f in fields)})
        assert isinstance(found, list), found
        return "\n".join(found)

    golden.answers("errors/job", errors)


@pytest.mark.parametrize("target", ["Mine", "", ".x.Mine", "a..Mine", "a.b.", "a b.Mine", "os.system()"])
def test_what_is_no_import_path(target: str) -> None:
    errors: list[str] = []
    assert load_job(JobSpec(target=target, fields={}), errors) is None
    assert errors == [f"job._target_={target}: expected package.module.Class"]


def test_a_class_that_is_no_job_is_not_even_made() -> None:
    """``_target_`` must not become a way to run anything."""
    errors: list[str] = []
    spec = JobSpec(target="subprocess.Popen", fields={"args": "touch should-not-exist"})
    assert load_job(spec, errors) is None
    assert errors == ["job._target_=subprocess.Popen: not a subclass of orchestrator.Job; derive the class from it"]


def test_the_working_directory_is_searched_as_python_m_would(tmp_path: Path) -> None:
    """A console script does not put it on the path."""
    (tmp_path / "my_own_job.py").write_text(HEAD + "class Mine(Job):\n" + METHODS)
    code = """
import sys
sys.path = [p for p in sys.path if p]
from orchestrator.config.schema import JobSpec
from orchestrator.config.job_loader import load_job
faults = []
assert load_job(JobSpec(target="my_own_job.Mine", fields={}), faults), faults
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
