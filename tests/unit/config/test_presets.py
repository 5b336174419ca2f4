"""Presets of a mesh: files of values over one class of keys, whose sizes have two names."""

from pathlib import Path

import pytest
import yaml

from orchestrator.config.compose import compose
from orchestrator.config.files import FIXED, conf_dir, group_values, preset_values
from orchestrator.config.help import help_text
from orchestrator.config.recorded_config import overrides_to_evaluate, to_dict, to_yaml
from orchestrator.config.schema import Config
from orchestrator.strategies import registry
from orchestrator.strategies.keys import PRESETS, MeshConfig

SIZES = [
    ("hsdp", "shard", "shard_size"),
    ("ddp_pipeline", "pipeline", "pipeline_parallel_size"),
    ("fsdp_pipeline", "pipeline", "pipeline_parallel_size"),
]


def composed(*words: str) -> Config:
    config, errors = read(*words)
    assert not errors, errors
    assert config is not None
    return config


def read(*words: str) -> tuple[Config | None, list[str]]:
    errors: list[str] = []
    return compose(words, errors, registry.config_class)[0], errors


@pytest.mark.parametrize(("preset", "name", "usual"), SIZES)
def test_a_size_may_be_typed_by_both_names_and_is_shown_by_the_usual_one(preset: str, name: str, usual: str) -> None:
    config = composed(f"strategy={preset}", f"strategy.{name}=3")
    assert config == composed(f"strategy={preset}", f"strategy.{usual}=3")
    assert isinstance(config.strategy, MeshConfig)
    assert (getattr(config.strategy, name), config.strategy.typed(name)) == (3, f"strategy.{usual}=3")
    recorded = to_dict(config)["strategy"]
    assert (recorded[usual], name in recorded) == (3, False)
    assert f"strategy.{usual}=3 " in help_text([f"strategy={preset}", f"strategy.{name}=3"], registry.config_class)
    assert composed(f"strategy={preset}", f"strategy.{usual}=2", f"strategy.{name}=3") == config
    _, (error,) = read(f"strategy={preset}", f"strategy.{name}=1")
    assert error == f"strategy.{usual}=1: must be at least 2"


@pytest.mark.parametrize(("preset", "name", "usual"), SIZES)
def test_files_and_records_have_either_name(
    preset: str, name: str, usual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = composed(f"strategy={preset}", f"strategy.{name}=3")
    (tmp_path / "conf/strategy").mkdir(parents=True)
    for key in (name, usual):
        (tmp_path / f"conf/strategy/by_{key}.yaml").write_text(f"# @package strategy\ndefaults: [{preset}]\n{key}: 3\n")
    monkeypatch.chdir(tmp_path)
    assert composed(f"strategy=by_{name}").strategy == composed(f"strategy=by_{usual}").strategy == expected.strategy
    record = tmp_path / "config.yaml"
    record.write_text(to_yaml(to_dict(composed(f"strategy={preset}", f"strategy.{usual}=2"))))
    assert composed(*overrides_to_evaluate(record, [f"strategy.{name}=3"])).strategy == expected.strategy


def test_sizes_of_other_presets_are_refused() -> None:
    assert read("strategy=ddp", "strategy.shard=2")[1] == [
        "strategy.shard: no such key in strategy=ddp; it belongs to strategy=mesh"
    ]
    assert read("strategy=mesh", "strategy.shard_size=2")[1] == [
        "strategy.shard_size: no such key in strategy=mesh; it belongs to strategy=hsdp"
    ]


def test_a_default_stands_in_one_file() -> None:
    files = [*(conf_dir() / "mesh").glob("*.yaml"), *(conf_dir() / f"strategy/{name}.yaml" for name in PRESETS)]
    found = [key for file in files for key in yaml.safe_load(file.read_text())]
    several = {key for key in found if found.count(key) > 1} - {"name", "num_workers", "defaults", FIXED}
    assert several == {"pipeline_parallel_size", "reshard_after_forward"}, "of presets that cut the model"


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_fixes_cannot_be_set(preset: str) -> None:
    config, opened = composed(f"strategy={preset}").strategy, group_values("strategy", preset)
    assert to_dict(composed(f"strategy={preset}"))["strategy"] == opened
    fixed = vars(config).keys() - {"name"} - opened.keys() - {key for of, key, _ in SIZES if of == preset}
    _, errors = read(f"strategy={preset}", *(f"strategy.{key}={preset_values(preset)[key]}" for key in fixed))
    assert {error.partition(";")[0] for error in errors} == {
        f"strategy.{key}: no such key in strategy={preset}" for key in fixed
    }
