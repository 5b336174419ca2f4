"""Finding a person's callbacks: made of their arguments, and refused in plain words, all before anything starts."""

import textwrap
from pathlib import Path

import pytest
import yaml

from helpers.files.golden import Golden
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import load_callbacks
from orchestrator.config.recorded_config import to_dict
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import JobSpec
from orchestrator.strategies import registry
from orchestrator.user_code.callbacks import Callback

SOURCE = """
    from __future__ import annotations
    import sys
    from dataclasses import dataclass
    from orchestrator import Callback, StepEnd

    class Plain(Callback):
        def on_step_end(self, info: StepEnd) -> None: ...

    class Beep(Callback):
        def __init__(self, every: int = 1, volume: float | None = None, word: str = "beep"):
            if every == 13:
                raise KeyError("unlucky")
            if every == 14:
                sys.exit(3)
            self.given = (every, volume, word)

    @dataclass
    class Required(Callback):
        path: str

    class Misspelt(Callback):
        def on_stepend(self, info): ...

    class Stranger:
        def on_step_end(self, info): ...
    """


@pytest.fixture(autouse=True)
def sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sounds.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(tmp_path)


def load(target: str, *fields: str) -> list[Callback] | list[str]:
    given = {name: yaml.safe_load(value) for name, _, value in (field.partition("=") for field in fields)}
    errors: list[str] = []
    made = load_callbacks([JobSpec(target=target, fields=given)], errors, Redactor())
    return errors or made


def test_arguments_have_the_types_of_the_class_however_it_is_written() -> None:
    words = ["callbacks=[sounds.Plain,{_target_:sounds.Beep,every:10,word:1.10},{_target_:sounds.Required,path:7}]"]
    errors: list[str] = []
    config, _ = compose(words, errors, registry.config_class)
    assert config is not None, errors
    plain, beep, required = load_callbacks(config.callbacks, errors, Redactor())
    assert errors == []
    assert [type(c).__name__ for c in (plain, beep, required)] == ["Plain", "Beep", "Required"]
    assert (vars(beep)["given"], vars(required)["path"]) == ((10, None, "1.10"), "7")
    recorded = to_dict(config)["callbacks"]
    assert recorded[:2] == [{"_target_": "sounds.Plain"}, {"_target_": "sounds.Beep", "every": 10, "word": 1.10}]
    assert config.modules() == {"jobs.digits", "sounds"}


def test_a_callback_that_cannot_be_is_refused_in_plain_words(golden: Golden) -> None:
    def errors(*words: str) -> str:
        found = load(*words)
        assert all(isinstance(error, str) for error in found), found
        return "\n".join(map(str, found))

    golden.answers("errors/callbacks", errors)


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("callbacks=sounds.Beep", "callbacks=sounds.Beep: expected a list, as in callbacks=[my_package.Beep]"),
        ("callbacks=[{every:3}]", "callbacks[0]._target_=null: expected package.module.Class"),
        ("callbacks=[3]", "callbacks[0]._target_=3: expected package.module.Class"),
    ],
)
def test_what_is_no_list_of_classes(word: str, error: str) -> None:
    errors: list[str] = []
    compose([word], errors, registry.config_class)
    assert errors == [error]
