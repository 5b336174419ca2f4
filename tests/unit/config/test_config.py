"""From words to a frozen configuration: composed, typed, and refused with every fault at once."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.files.golden import Golden
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose, preset_sweep
from orchestrator.config.files import GROUPS, choices, conf_dir, group_values, summary
from orchestrator.config.operation import ClusterConfig, TrackingConfig
from orchestrator.config.overrides import expand_sweep, last_of_each
from orchestrator.config.recorded_config import to_dict, to_yaml
from orchestrator.config.schema import CheckpointConfig, Config, DataConfig, JobSpec, TrainConfig
from orchestrator.config.text import path_override
from orchestrator.strategies import registry
from orchestrator.strategies.keys import MeshConfig

SECTIONS = {"train": TrainConfig, "data": DataConfig, "checkpoint": CheckpointConfig}


def composed(*words: str) -> Config:
    errors: list[str] = []
    config, _ = compose(words, errors, registry.config_class)
    assert not errors, errors
    assert config is not None
    return config


def errors_of(*words: str) -> list[str]:
    errors: list[str] = []
    config, _ = compose(words, errors, registry.config_class)
    assert (config is None) == bool(errors)
    return list(dict.fromkeys(errors))


def only_error(*words: str) -> str:
    (error,) = errors_of(*words)
    return error


def read(path: str) -> dict[str, Any]:
    data = yaml.safe_load((conf_dir() / path).read_text()) or {}
    assert isinstance(data, dict)
    return data


def keys(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


# The files and the schema -------------------------------------------------------------------------


def test_the_root_file_has_exactly_the_keys_of_the_schema() -> None:
    root = read("config.yaml")
    defaults = root.pop("defaults")
    groups = {name for entry in defaults if isinstance(entry, dict) for name in entry}
    assert groups == set(GROUPS)
    assert root.keys() == keys(Config) - set(GROUPS)
    for section, cls in SECTIONS.items():
        assert root[section].keys() == keys(cls), section


@pytest.mark.parametrize("word", choices("strategy"))
def test_every_strategy_file_has_a_strategy_with_exactly_its_keys_and_a_summary(word: str) -> None:
    file = group_values("strategy", word)
    assert file["name"] == word
    assert file.keys() == keys(registry.config_class(word))
    assert summary("strategy", word)


@pytest.mark.parametrize(("group", "cls"), [("cluster", ClusterConfig), ("tracking", TrackingConfig)])
def test_group_defaults_are_complete_and_the_others_build_on_them(group: str, cls: type) -> None:
    assert read(f"{group}/default.yaml").keys() == keys(cls)
    for word in choices(group):
        if word != "default":
            file = read(f"{group}/{word}.yaml")
            assert file.pop("defaults") == ["default"]
            assert file.keys() < keys(cls), word


def test_job_files_only_name_the_class() -> None:
    for word in choices("job"):
        assert group_values("job", word).keys() == {"_target_"}, word


@pytest.mark.parametrize(("group", "word"), [(g, w) for g in GROUPS for w in choices(g)])
def test_every_word_of_every_group_composes(group: str, word: str) -> None:
    composed(f"{group}={word}")


def test_schema_fields_have_no_defaults_so_that_values_stand_in_one_place() -> None:
    for cls in (
        Config,
        *SECTIONS.values(),
        ClusterConfig,
        TrackingConfig,
        *map(registry.config_class, choices("strategy")),
    ):
        for field in dataclasses.fields(cls):
            assert field.default is dataclasses.MISSING, f"{cls.__name__}.{field.name}"
            assert field.default_factory is dataclasses.MISSING, f"{cls.__name__}.{field.name}"


# Composition --------------------------------------------------------------------------------------


def test_defaults() -> None:
    config = composed()
    assert isinstance(config.strategy, MeshConfig)
    assert config.strategy.num_workers == "auto"
    assert config.job == JobSpec(target="jobs.digits.Digits", fields={})
    assert config.run_name == "digits-ddp"


def test_words_choose_groups_and_set_keys() -> None:
    config = composed("strategy=single", "job=gpt", "job.layers=2", "train.steps=7", "tracking=none", "name=mine")
    assert config.strategy.name == "single"
    assert config.job == JobSpec(target="jobs.gpt.GPT", fields={"layers": 2})
    assert (config.train.steps, config.tracking.uri, config.run_name) == (7, None, "mine")


def test_a_composition_leaves_nothing_to_the_next() -> None:
    before = composed()
    composed("train.steps=7", "cluster.env.A=1", "job.hidden=3")
    assert composed() == before


def test_an_experiment_beats_the_defaults_and_the_command_line_beats_the_experiment() -> None:
    preset = read("experiment/quick.yaml")["train"]
    assert composed("experiment=quick").train.steps == preset["steps"] != composed().train.steps
    config = composed("train.steps=9", "experiment=quick")
    assert (config.train.steps, config.train.log_every) == (9, preset["log_every"])
    assert composed("experiment=null") == composed()


def test_a_section_can_be_given_at_once() -> None:
    config = composed("train={steps: 3, log_every: 2}")
    assert (config.train.steps, config.train.log_every) == (3, 2)
    assert config.train.eval_every == composed().train.eval_every


def test_plus_signs_change_nothing() -> None:
    assert composed("+train.steps=3", "++seed=4", "+strategy=single") == composed(
        "train.steps=3", "seed=4", "strategy=single"
    )


def test_interpolations_are_resolved_on_the_spot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_NAME", "from-outside")
    config = composed("name=${oc.env:A_NAME}", "train.log_every=${train.steps}", "job.width=${train.steps}")
    assert config.name == "from-outside"
    assert config.train.log_every == config.train.steps
    assert config.job.fields == {"width": config.train.steps}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("output_dir=~/runs", "~/runs"),
        ("output_dir=/a/b(1)", "/a/b(1)"),
        ("output_dir=Größe", "Größe"),
        ("output_dir=with space", "with space"),
        ("output_dir='with, comma'", "with, comma"),
        ("output_dir=2026", "2026"),
    ],
)
def test_text_is_taken_as_it_was_typed(word: str, value: str) -> None:
    assert composed(word).output_dir == value


def test_an_address_with_a_query_is_text() -> None:
    assert composed("tracking.uri=postgresql://u@h/db?a=b").tracking.uri == "postgresql://u@h/db?a=b"


def test_yaml_and_dict_come_back_as_the_files_have_them() -> None:
    data = to_dict(composed("job.hidden=3"))
    assert data["job"] == {"_target_": "jobs.digits.Digits", "hidden": 3}
    assert yaml.safe_load(to_yaml(data)) == data


# Faults -------------------------------------------------------------------------------------------


def test_of_a_key_that_is_given_twice_the_last_one_counts_with_a_note(golden: Golden) -> None:
    typed = (
        "seed=1 -m --config-dir=a --config-dir=b +seed=2 seed=2 job=digits strategy=ddp job=my.Line job.lr=1,2 "
        "strategy=single job.lr=3 my/group=a my/group=b cluster.env.API_TOKEN=one cluster.env.API_TOKEN=two "
        "job.password=[hunter2] job.password=hunter2 bar"
    )
    notes: list[str] = []
    words = last_of_each(typed.split(), notes.append)
    golden.says(notes)
    assert " ".join(words) == (
        "-m --config-dir=a --config-dir=b seed=2 job=my.Line strategy=single job.lr=3 my/group=b "
        "cluster.env.API_TOKEN=two job.password=hunter2 bar"
    )
    notes.clear()
    assert last_of_each(["strategy=ddp", "--x", "--x", "strategy=ddp"], notes.append) == ["--x", "strategy=ddp"]
    assert notes == ["strategy: given more than once; the last value counts"]
    assert composed("train.steps=1", "strategy=single", "train.steps=2", "strategy=ddp").train.steps == 2


@pytest.mark.slow
def test_what_is_refused(golden: Golden) -> None:
    def errors(*words: str) -> str:
        text = "\n".join(errors_of(*words))
        for group in GROUPS:
            text = text.replace(", ".join(choices(group)), f"<every {group}>")
        return text

    golden.answers("errors/config", errors)


@pytest.mark.parametrize(
    "word",
    [
        *("ünï=5", "train..steps=5", ".train=5", "train.=5", "train[0]=5", "a b=3", "a:b=3", "=", "+=3", "job.größe=5"),
        *(
            "train.steps==5",
            "job.s=[",
            "job.s={a",
            "job.s=a[b",
            "train.steps=${",
            "seed=" + "9" * 5000,
            "job.s=\n",
            "job.s=\udcff",
        ),
    ],
)
def test_what_no_grammar_has_is_refused_in_one_sentence(word: str) -> None:
    assert only_error(word).startswith(word.partition("=")[0])


@pytest.mark.parametrize("character", ["\n", "\x1b", "\x9b", "\u2028", "\u202e"])
def test_a_name_has_no_characters_that_rule_a_terminal(character: str) -> None:
    assert only_error(f"name='a{character}b'").endswith("characters without slashes or control characters")


def test_keys_below_an_unknown_word_are_not_judged() -> None:
    assert len(errors_of("strategy=piipeline", "strategy.schedule=1f1b")) == 1
    errors: list[str] = []
    assert compose(["job=gptt", "job.layers=2"], errors, registry.config_class)[1] is None
    assert len(errors) == 1


@pytest.mark.parametrize("text", ["1_0", "1e3", "007", "true", "nan", "-5", "1.", "2026-11-21", "v1.0"])
def test_text_stays_as_it_was_typed(text: str) -> None:
    config = composed(f"name={text}", f"tracking.experiment={text}")
    assert (config.name, config.tracking.experiment) == (text, text)


def test_the_variables_of_mlflow_count_where_nothing_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def tracking(*words: str) -> tuple[str | None, str]:
        config = composed(*words).tracking
        return config.uri, config.experiment

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:p%40w@host:5000/a?b=c")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "2024, größe")
    assert tracking() == ("https://me:p%40w@host:5000/a?b=c", "2024, größe")
    assert tracking("tracking=none") == (None, "2024, größe")
    assert tracking("tracking.uri=http://other", "tracking.experiment=mine") == ("http://other", "mine")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")
    assert tracking() == ("sqlite:///mlflow.db", "orchestrator")


@pytest.mark.parametrize("experiment", ["''", "x" * 251, "'a\0b'"])
def test_an_experiment_has_a_name_that_mlflow_can_store(experiment: str) -> None:
    assert "expected 1 to 250 characters" in only_error(f"tracking.experiment={experiment}")


@pytest.mark.parametrize(
    "path", ["/a/b-1", "s3://bucket/runs/1", "/it's (a) $HOME, ${b}/x=1", "/a b/[c]{d:e}/", "~/1_0", "/größe/猫\\"]
)
def test_a_path_of_any_characters_can_be_typed(path: str) -> None:
    assert composed(path_override("resume", path)).resume == path


def test_text_in_a_section_stays_as_it_was_typed() -> None:
    words = "cluster.env.A=1.10", "cluster.env.B=INIT,NET", "cluster.env.C=null", "cluster.env.D=true"
    cluster = composed(*words, "cluster.pip=[1.10,x]", "cluster.exclude_nodes=[10.10,1_1]").cluster
    assert cluster.env == {"A": "1.10", "B": "INIT,NET", "C": None, "D": "true"}
    assert (cluster.pip, cluster.exclude_nodes) == (("1.10", "x"), ("10.10", "1_1"))
    assert composed("cluster.pip=1.10").cluster.pip == "1.10"


def test_text_in_a_file_stays_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\nname: 1_0\ncluster: {env: {A: 1.10, B: yes, C: 0x10, D: 1:30, E: 010, F: null}}\n"
        "train: {steps: 1_0, clip_norm: 1e0}\nhydra: {sweeper: {params: {job.x: 1.10}}}\n"
    )
    config = composed("experiment=mine")
    assert config.name == "1_0"
    assert config.cluster.env == {"A": "1.10", "B": "yes", "C": "0x10", "D": "1:30", "E": "010", "F": None}
    assert (config.train.steps, config.train.clip_norm) == (10, 1.0)
    assert preset_sweep(["experiment=mine"]) == {"job.x": "1.10"}


def test_null_is_no_text() -> None:
    assert composed("name=null", "tracking.uri=null").name is None


def test_a_job_is_returned_beside_errors_elsewhere_so_that_it_is_checked_too() -> None:
    errors: list[str] = []
    config, job = compose(["train.steps=x", "job.hidden=3"], errors, registry.config_class)
    assert config is None
    assert job == JobSpec(target="jobs.digits.Digits", fields={"hidden": 3})


def test_a_config_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["one", "two", "one"])))
    assert error.errors == ("one", "two")
    assert str(error) == "one\ntwo"


# Sweeps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ([], [[]]),
        (["seed=1"], [["seed=1"]]),
        (["seed=1,2"], [["seed=1"], ["seed=2"]]),
        (
            ["strategy=single,ddp", "name=x", "seed=1,2"],
            [[f"strategy={s}", "name=x", f"seed={i}"] for s in ("single", "ddp") for i in (1, 2)],
        ),
        (["name='a,b'"], [["name='a,b'"]]),
        (["name=1_0,x"], [["name=1_0"], ["name=x"]]),
        (["job.x=1.10,+5,1e5,true"], [["job.x=1.10"], ["job.x=+5"], ["job.x=1e5"], ["job.x=true"]]),
        (["job.x=choice(1.10,'1.1')"], [["job.x=1.10"], ["job.x='1.1'"]]),
        (["job.x=sort(10,9,1.10)"], [["job.x=1.10"], ["job.x=9"], ["job.x=10"]]),
        (["job.x=sort(1,2,reverse=false)"], [["job.x=1"], ["job.x=2"]]),
        (["job.x=int(1.5,2)"], [["job.x=1"], ["job.x=2"]]),
        (["job.x=[1.10],{1.10:1_0}"], [["job.x=[1.10]"], ["job.x={1.10:1_0}"]]),
        (["name='a,b',c"], [["name='a,b'"], ["name=c"]]),
        (["job.x=[1,2]"], [["job.x=[1,2]"]]),
        (["job.x=[1,2],[3]"], [["job.x=[1,2]"], ["job.x=[3]"]]),
        (["job.x={a:1,b:2}"], [["job.x={a:1,b:2}"]]),
        (["strategy=glob(*pipe*)"], [[f"strategy={s}"] for s in ("ddp_pipeline", "fsdp_pipeline", "pipeline")]),
        (["strategy=glob([d*,m*],exclude=*p*)"], [["strategy=mesh"]]),
        (["train.steps=choice(5,6)"], [["train.steps=5"], ["train.steps=6"]]),
        (["seed=range(0,3)"], [["seed=0"], ["seed=1"], ["seed=2"]]),
        (["output_dir=~/x"], [["output_dir='~/x'"]]),
    ],
)
def test_a_sweep_is_every_combination_in_order(words: list[str], runs: list[list[str]]) -> None:
    assert expand_sweep(words) == runs


def test_a_preset_adds_its_keys_to_a_sweep_unless_they_are_given() -> None:
    preset = {"strategy": "single,ddp", "train.steps": "5"}
    assert expand_sweep(["seed=1"], preset) == [
        ["seed=1", f"strategy={name}", "train.steps=5"] for name in ("single", "ddp")
    ]
    assert expand_sweep(["strategy=fsdp"], preset) == [["strategy=fsdp", "train.steps=5"]]


@pytest.mark.needs("asynchronous")
def test_the_comparison_has_every_strategy_and_begins_with_the_baseline() -> None:
    (first, *_) = strategies = preset_sweep(["experiment=compare"])["strategy"].split(",")
    assert first == "single"
    assert set(strategies) == set(choices("strategy")) - {"auto", "script", "mesh"}  # of mesh, they are the cases


@pytest.mark.slow
@pytest.mark.parametrize("name", choices("experiment"))
def test_every_preset_has_valid_runs_and_one_of_a_sweep_several(name: str) -> None:
    words = [f"experiment={name}"]
    runs = expand_sweep(words, preset_sweep(words))
    assert (len(runs) > 2) == (name not in ("overfit", "quick", "rate_finder"))
    for run in runs:
        assert errors_of(*run) == []


def test_what_is_no_list_of_values_cannot_be_swept() -> None:
    with pytest.raises(ConfigError) as error:
        expand_sweep(["seed=interval(0,1)", "train.steps=glob(*)", "bar"])
    assert sorted(f.partition(":")[0] for f in error.value.errors) == [
        "bar",
        "seed=interval(0,1)",
        "train.steps=glob(*)",
    ]
