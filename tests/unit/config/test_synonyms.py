"""Keys of other launchers lead to ours."""

import dataclasses
import re

import pytest

from orchestrator.config.schema import Config
from orchestrator.config.synonyms import GONE, NAMES, instead
from orchestrator.strategies.registry import NAMES as STRATEGIES
from orchestrator.strategies.registry import config_class


def known_keys() -> set[str]:
    sections = {field.name: field.type for field in dataclasses.fields(Config)}
    found = {*sections, "cluster", "experiment", "strategy"}
    module = vars(__import__(Config.__module__, fromlist=["Config"]))
    for name, kind in sections.items():
        if dataclasses.is_dataclass(section := module.get(str(kind))):
            found |= {f"{name}.{field.name}" for field in dataclasses.fields(section)}
    return found | {f"strategy.{field.name}" for name in STRATEGIES for field in dataclasses.fields(config_class(name))}


@pytest.mark.needs("asynchronous")
def test_every_remedy_names_keys_that_exist() -> None:
    named = {key for remedy in NAMES for key in re.findall(r"[a-z_]+\.[a-z_]+|^[a-z_]+|[a-z_]+(?==)", remedy)}
    named |= {key for remedy in GONE.values() for key in re.findall(r"[a-z_.]+(?==)", remedy)}
    assert named - known_keys() == set()
    assert GONE.keys() & known_keys() == set()


def test_no_word_has_two_remedies() -> None:
    words = [word for names in NAMES.values() for word in names.split()]
    assert len(words) == len({*words})


@pytest.mark.parametrize("word", ["max_epochs", "--max-epochs", "maxEpochs", "MAX_EPOCHS"])
def test_words_are_known_however_they_are_written(word: str) -> None:
    assert instead(word) == "use train.epochs"
    assert instead("foo") is None
