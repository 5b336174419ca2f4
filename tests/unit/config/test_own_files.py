"""A user's own ``conf/``: composed after ours as Hydra does it, shown by ``--cfg``, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from helpers.files.documents import ROOT, files
from helpers.files.golden import Golden
from orchestrator import evaluate, launch, schema
from orchestrator.config.compose import compose, preset_sweep
from orchestrator.config.files import FIXED, SHIPPED, Files, choices, conf_dir
from orchestrator.config.json_schema import json_schema
from orchestrator.config.overrides import choosing, expand_sweep, is_search, masked, search_space
from orchestrator.config.recorded_config import overrides_to_evaluate, to_dict, to_yaml
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.preflight.record import command_line
from orchestrator.strategies import registry

FILES = {
    "conf/job/line.yaml": "# a line\n_target_: jobs.digits.Digits\nhidden: 8\nlr: ${oc.env:LR,0.5}\n",
    "conf/cluster/ours.yaml": "defaults: [default, _self_]\ncpus_per_worker: 0.5\nenv: {RELEASE: 1.10}\n",
    "conf/strategy/mine.yaml": "# @package strategy\n# ddp with small buckets\ndefaults: [ddp]\nbucket_mb: 7\n",
    "conf/width/wide.yaml": "# @package job\nhidden: 99\n",
    "conf/experiment/mine.yaml": (
        "# @package _global_\ndefaults: [override /job: line, override /cluster: ours, override /strategy: mine]\n"
        "train: {steps: 1e1}\n"
    ),
    "conf/experiment/short.yaml": "# @package _global_\ntrain: {steps: 2}\n",
    "conf/mine.yaml": (
        "defaults: [config, override strategy: single, override job: line, _self_]\n"
        "name: 1.10\ntracking: {uri: null}\noutput_dir: mine\n"
    ),
    "elsewhere/job/far.yaml": "_target_: jobs.toy.Toy\n",
}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        write(tmp_path / name, text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def composed(*words: str) -> Config:
    errors: list[str] = []
    config, _ = compose(words, errors, registry.config_class)
    assert config is not None, errors
    return config


def only_error(*words: str) -> str:
    errors: list[str] = []
    assert compose(words, errors, registry.config_class)[0] is None
    (error,) = dict.fromkeys(errors)
    return error.replace(f"{Path.cwd()}/", "")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert launch.main(words) == 0
    return capsys.readouterr().out


# Composition --------------------------------------------------------------------------------------


def test_groups_of_the_user_compose_with_defaults_lists_and_packages() -> None:
    config = composed("experiment=mine")
    assert (config.strategy.name, config.train.steps, config.cluster.cpus_per_worker) == ("ddp", 10, 0.5)
    assert to_dict(config)["strategy"]["bucket_mb"] == 7
    assert config.cluster.env == {"RELEASE": "1.10"}
    assert config.job.fields == {"hidden": 8, "lr": 0.5}
    assert composed("job=line", "+width=wide").job.fields["hidden"] == 99
    assert composed("experiment=[mine,short]").train.steps == 2


def test_the_command_line_beats_the_files_of_the_user_which_beat_ours() -> None:
    assert composed("cluster=ours").cluster.cpus_per_worker == 0.5 != composed().cluster.cpus_per_worker
    assert composed("cluster=ours", "cluster.cpus_per_worker=2").cluster.cpus_per_worker == 2
    assert composed("experiment=mine", "job=gpt", "strategy=single").job.target == "jobs.gpt.GPT"


@pytest.mark.slow
def test_a_class_may_take_the_place_of_the_name_of_a_job_unless_a_file_has_that_name() -> None:
    assert composed("job=a.line", "job.width=3") == composed("job._target_=a.line", "job.width=3")
    write(Path("conf/job/a.line.yaml"), "_target_: jobs.toy.Toy\n")
    assert composed("job=a.line").job.target == "jobs.toy.Toy"
    runs = expand_sweep(["job=line,b.Line", "strategy=single,ddp"])
    assert [composed(*run).job.target for run in runs] == [*["jobs.digits.Digits"] * 2, *["b.Line"] * 2]


def test_a_primary_file_of_the_user_extends_ours() -> None:
    config = composed("--config-name=mine")
    assert (config.name, config.strategy.name, config.tracking.uri) == ("1.10", "single", None)
    assert composed("--config-name=mine.yaml", "strategy=mine").strategy.name == "ddp"
    assert choosing(["--config-name=mine", "job=line", "seed=3", "job=nope"], "seed") == [
        *("--config-name=mine", "job=line", "seed=3")
    ]


def test_another_directory_takes_the_place_of_conf() -> None:
    assert composed("--config-dir=elsewhere", "job=far").job.target == "jobs.toy.Toy"
    assert only_error("job=far").startswith("job=far: unknown; ")
    assert only_error("--config-dir=elsewhere", "job=line").startswith("job=line: unknown; ")


def test_the_checkout_is_no_directory_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(conf_dir().parent)
    assert Files.of([]).own is None


@pytest.mark.parametrize(("value", "steps"), [("12", 12), ("1e3", 1000)])
def test_an_environment_variable_may_be_a_number(monkeypatch: pytest.MonkeyPatch, value: str, steps: int) -> None:
    monkeypatch.setenv("STEPS", value)
    config = composed("train.steps=${oc.env:STEPS}", "name=${oc.env:STEPS}", "job.x=n-${oc.env:STEPS}")
    assert (config.train.steps, config.name, config.job.fields) == (steps, value, {"x": f"n-{value}"})


def test_the_files_of_the_page_compose(directory: Path) -> None:
    blocks = files(ROOT / "docs/configuration.md")
    assert len(blocks) == 5
    for name, text in blocks.items():
        write(directory / name, text)
    config = composed("experiment=mine", "cluster=ours")
    assert (config.strategy.name, config.train.steps, config.cluster.address) == ("pipeline", 1000, "auto")
    assert composed("--config-name=mine", "train.steps=20").seed == 7
    words = ["experiment=rates"]
    assert len(expand_sweep(words, preset_sweep(words))) == 6


# Sweeps, and commands that a run suggests ---------------------------------------------------------


def test_every_run_of_a_sweep_has_the_files() -> None:
    runs = expand_sweep(["--config-dir=elsewhere", "job=far,digits"])
    assert runs == [["--config-dir=elsewhere", f"job={name}"] for name in ("far", "digits")]
    assert expand_sweep(["+width=glob(*)"]) == [["+width=wide"]]
    command = command_line(["--config-name=mine", "seed=1"], Redactor())
    assert command.endswith("--config-name=mine seed=1")
    assert masked("--config-name=mine", Redactor()) == "--config-name=mine"


def test_a_sweep_in_a_file_of_the_user_is_a_grid_or_a_search(directory: Path) -> None:
    sweep = "hydra: {sweeper: {params: {job.lr: 'choice(0.1,1.10)'}}}\n"
    write(directory / "conf/experiment/lrs.yaml", f"# @package _global_\ndefaults: [mine]\n{sweep}")
    words = ["experiment=lrs"]
    assert expand_sweep(words, preset_sweep(words)) == [["experiment=lrs", f"job.lr={lr}"] for lr in ("0.1", "1.10")]
    assert launch.main(words) == 2

    write(directory / "conf/search.yaml", f"defaults: [mine, _self_]\nsweep: {{trials: 3}}\n{sweep}")
    words = ["--config-name=search"]
    preset = preset_sweep(words)
    assert is_search(words, preset)
    assert search_space(words, preset)[0] == ["--config-name=search", "sweep.trials=3"]
    assert preset_sweep(["job=line"]) == {}


# --cfg, --info, --version -------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cfg_prints_may_be_put_into_conf(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["job.a=1.10", "job.b='1.10'", "job.c=1e5", "job.d=nan", "job.e='null'", "job.f=[1_0,true]", r"job.g=\${x}"]
    words = ["strategy=pipeline", "job=line", "cluster=ours", "train.clip_norm=1e0", *texts]
    text = shown(capsys, *words, "--cfg", "job")
    write(directory / "conf/all.yaml", text)
    write(directory / "conf/experiment/all.yaml", text)
    assert "a: 1.10\n" in text
    assert "lr: ${oc.env:LR,0.5}" in text
    assert "hydra" not in yaml.safe_load(text)
    for again in (["--config-name=all"], ["experiment=all"]):
        assert shown(capsys, *again, "-c", "job") == text
        assert composed(*again) == composed(*words)
        fields, before = composed(*again).job.fields, composed(*words).job.fields
        assert {k: str(v) for k, v in fields.items()} == {k: str(v) for k, v in before.items()}
    assert "sets strategy.name=pipeline" in only_error("experiment=all", "strategy=single")


def test_cfg_shows_a_section_and_masks_secrets(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = shown(capsys, "job=line", "job.api_key=abc123def456", "-c", "job", "-p", "job", "--resolve")
    assert section.startswith("# @package job\n_target_: jobs.digits.Digits\n")
    assert "lr: 0.5\n" in section
    assert "api_key: '***'" in section
    write(directory / "conf/job/secret.yaml", section)
    assert only_error("job=secret").startswith("job.api_key=***: stands for a secret")
    assert shown(capsys, "train.steps=7", "-c", "job", "--package", "train.steps") == "7\n"
    assert yaml.safe_load(shown(capsys, "--cfg", "all")).keys() > {"hydra", "train"}
    assert list(yaml.safe_load(shown(capsys, "--cfg", "hydra"))) == ["hydra"]


@pytest.mark.slow
def test_info_and_version_say_where_things_come_from(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"file://{directory}/conf" in shown(capsys, "--info", "searchpath")
    assert "cluster/ours" in shown(capsys, "-i", "defaults", "experiment=mine")
    assert "hidden: 8" in shown(capsys, "--info", "job=line")
    assert "orchestrator " in shown(capsys, "--version")


def test_the_help_reads_a_file_that_is_not_utf8(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "conf/strategy").mkdir(exist_ok=True)
    (directory / "conf/strategy/mine.yaml").write_bytes(b"# gr\xfc\xdfe\nname: ddp\n")
    assert "mine" in shown(capsys, "--help")


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "words", "error"),
    [
        ("job/gpt.yaml", "_target_: a.B", ["job=gpt"], "conf/job/gpt.yaml: hidden by the shipped file of this name"),
        ("part.yaml", "seed: 1", ["--config-name=part"], "--config-name=part: has no callbacks, checkpoint, cluster"),
        ("experiment/x.yaml", "seed: 1", ["experiment=x"], "experiment: no such section; begin its files with"),
        ("experiment/x.yaml", "a:\n\tb: 1", ["experiment=x"], "conf/experiment/x.yaml, line 2: not YAML"),
        ("experiment/x.yaml", "- 1", ["experiment=x"], "conf/experiment/x.yaml: expected keys with values"),
        ("experiment/x.yaml", "5", ["experiment=x"], "conf/experiment/x.yaml: expected keys with values"),
        ("experiment/x.yaml", "a: &a [*a]", ["experiment=x"], "conf/experiment/x.yaml: cannot be read"),
        ("experiment/x.yaml", "defaults: null", ["experiment=x"], "conf/experiment/x.yaml: defaults: expected a list"),
        ("experiment/x.yaml", "defaults: ddp", ["experiment=x"], "conf/experiment/x.yaml: defaults: expected a list"),
        ("own.yaml", "defaults: [own]", ["--config-name=own"], "conf/own.yaml: cannot be composed, because a file has"),
        ("x.yaml", "", [f"--config-name={'x' * 3000}"], f"--config-name={'x' * 3000}: no such file"),
        ("experiment/x.yaml", "# @package _global_\ntrain: {stps: 1}", ["experiment=x"], "train.stps: unknown key"),
        (
            "experiment/x.yaml",
            "# @package _global_\ndefaults: [override /job: no]",
            ["experiment=x"],
            "conf/experiment/x.yaml, line 2: job=no: unknown; valid: digits, gpt",
        ),
        ("x.yaml", "hydra: {run: {dir: a}}", ["--config-name=x"], "conf/x.yaml: hydra.run.dir: has no effect here"),
        ("x.yaml", "hydra: {verbose: true}", ["--config-name=x"], "conf/x.yaml: hydra.verbose: has no effect here"),
        ("x.yaml", "hydra: {sweeper: {n: 1}}", ["--config-name=x"], "conf/x.yaml: hydra.sweeper.n: has no effect"),
        ("x.yaml", "", ["hydra.job.chdir=true"], "hydra.job.chdir: has no effect here; remove it"),
        ("x.yaml", "", ["hydra/launcher=joblib"], "hydra/launcher: has no effect here; set sweep.parallel"),
        ("x.yaml", "", ["--config-name=xx"], "--config-name=xx: no such file; did you mean x?"),
        ("x.yaml", "", ["--config-dir=nowhere"], "--config-dir=nowhere: no such directory"),
        ("x.yaml", "", ["+width=wid"], "+width=wid: unknown; did you mean wide?"),
        ("x.yaml", "", ["train.steps=1.5"], "train.steps=1.5: expected a whole number"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    path: str, text: str, words: list[str], error: str, directory: Path
) -> None:
    if path == "x.yaml":
        text = f"defaults: [config, _self_]\n{text}"
    write(directory / "conf" / path, text)
    assert only_error(*words).startswith(error)


WITH_PLACES = {
    "conf/job/wrong.yaml": "# a comment\n_target_: jobs.digits.Digits\nhiden: 8\n",
    "conf/width/wrong.yaml": "# @package job\n\ndepht: 2\n",
    "conf/experiment/wrong.yaml": (
        "# @package _global_\ntrain:\n  steps: 5\n  eval_evry: 2\n  log_every: -1\nseed: 1\n"
        "checkpoint: {every: 1, kep: 2}\ntrain.steps: 3\n"
    ),
    "conf/experiment/sweep.yaml": "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 1,x\n",
    "conf/experiment/nothing.yaml": "# @package _global_\n\ntrain: {steps: '${nothing}'}\n",
    "conf/experiment/choice.yaml": "# @package _global_\ndefaults:\n  - mine\n  - override /strategy: ddpp # mine\n",
    "conf/experiment/open.yaml": "# @package _global_\nname: 'a\nseed: 1\n",
    "conf/primary.yaml": "defaults: [config, _self_]\ntrian: {steps: 1}\n",
}


@pytest.mark.parametrize(
    "words",
    [
        *("job=wrong +width=wrong", "experiment=wrong", "experiment=wrong train.log_every=-2 train.epocs=1"),
        *("-m experiment=sweep", "experiment=nothing", "experiment=choice", "experiment=open"),
        *("--config-name=primary", "--config-dir=conf experiment=[mine,wrong]"),
    ],
)
def test_an_error_in_a_file_of_the_user_names_the_file_and_the_line(
    words: str, directory: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    for name, text in WITH_PLACES.items():
        write(directory / name, text)
    assert launch.main(words.split()) == 2
    golden.says(capsys.readouterr().err, HERE=directory)


@pytest.mark.slow
def test_a_config_file_of_another_program_is_not_read_and_that_is_said(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(directory / "conf/config.yaml", "defaults: [model: big]\ntrain: {steps: 3}\nhydra: {run: {dir: x}}\n")
    assert composed("job=line").train.steps == composed("--config-dir=elsewhere").train.steps != 3
    out = shown(capsys, "plan=true", f"output_dir={directory}/runs", "tracking=none")
    assert f"warning: {directory}/conf/config.yaml is not read" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--cfg", "jb"], "-c/--cfg: invalid choice: 'jb'"),
        (["--config-dir"], "--config-dir/-cd: expected one argument"),
        (["--config-path=x"], "--config-path=x: has no effect here; give the directory with --config-dir"),
        (["--package", "train"], "--package, --resolve: only with --cfg"),
        (["-c", "job", "--package", "trai"], "--package=trai: no such section; did you mean train?"),
        (["-m", "--cfg", "job", "seed=1,2"], "--cfg, --info: for a single run"),
        (["-m", "--restarts=2"], "--restarts=2: only for a single run, without -m"),
    ],
)
def test_wrong_options_are_refused(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words) == 2
    assert f"  - {error}" in capsys.readouterr().err


# The record, and the schema -----------------------------------------------------------------------


def test_the_record_of_a_run_has_all_that_an_evaluation_needs_of_the_files(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("experiment=mine")
    write(directory / "runs/config.yaml", to_yaml(to_dict(config)))
    words = overrides_to_evaluate(directory / "runs/config.yaml", [])
    monkeypatch.chdir(directory / "runs")  # without conf/
    again = composed(*words)
    assert (again.job, again.strategy, again.cluster) == (config.job, config.strategy, config.cluster)
    assert evaluate.main(["nothing", "--config-dir", "nowhere"]) == 2


def test_a_run_of_some_epochs_is_evaluated_at_its_steps_or_for_other_epochs(directory: Path) -> None:
    of_epochs = composed("train.epochs=3")
    recorded = replace(of_epochs, train=replace(of_epochs.train, steps=66))
    write(directory / "runs/config.yaml", to_yaml(to_dict(recorded)))
    for given, expected in (([], (66, None)), (["train.steps=7"], (7, None)), (["train.epochs=2"], (500, 2.0))):
        train = composed(*overrides_to_evaluate(directory / "runs/config.yaml", given)).train
        assert (train.steps, train.epochs) == expected


@pytest.mark.slow
def test_the_json_schema_accepts_every_shipped_file_and_finds_wrong_keys_and_values(
    capsys: pytest.CaptureFixture[str],
    golden: Golden,
) -> None:
    assert schema.main(["job=line"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(found)
    whole = jsonschema.Draft202012Validator(found)
    for name in ["config", *(f"experiment/{name}" for name in choices("experiment"))]:
        assert whole.is_valid(yaml.safe_load((conf_dir() / f"{name}.yaml").read_text())), name
    strategies = {name: registry.config_class(name) for name in choices("strategy")}
    for group in ("strategy", "job", "cluster", "tracking"):
        of_group = jsonschema.Draft202012Validator(json_schema(composed(), strategies, None, Redactor(), group))
        for name in choices(group):
            path = SHIPPED.find(group, name)
            assert path is not None
            file = yaml.safe_load(path.read_text())
            file.pop(FIXED, None)  # which only ships
            assert of_group.is_valid(file), name
    for text in FILES["conf/mine.yaml"], "train: {steps: '${seed}'}", "cluster: {env: {A: 1}}":
        assert whole.is_valid(yaml.safe_load(text)), text
    for text in (
        *("train: {stps: 1}", "train: {steps: 0}", "train: {precision: fp8}"),
        *("job: {hidden: wide}", "strategy: {b: 1}"),
    ):
        assert not whole.is_valid(yaml.safe_load(text)), text
    steps = found["properties"]["train"]["properties"]["steps"]
    assert (steps["default"], steps["description"]) == (500, "optimizer steps of the whole run")
    assert found["properties"]["job"]["properties"]["hidden"]["default"] == 8
    assert schema.main(["trai"]) == 2
    golden.says(capsys.readouterr().err)
