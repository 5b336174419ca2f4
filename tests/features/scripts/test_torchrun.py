"""``orchestrator torchrun``: torchrun's options as overrides, and the script that they run."""

from pathlib import Path

import pytest

from helpers.machines.plans import config_of
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import JobSpec
from orchestrator.driver.checked_runs import check_all
from orchestrator.driver.preflight.record import settings_for_name
from orchestrator.strategies.external.job import Script
from orchestrator.torchrun import main, torchrun_overrides


def command_of(*words: str) -> tuple[JobSpec, object, int]:
    config = config_of(*words)
    return config.job, config.strategy.num_workers, config.recovery.max_failures


def test_the_options_of_torchrun() -> None:
    words, ignored = torchrun_overrides(["--nproc-per-node", "8", "train.py", "--lr", "0.1", "--name=x", "-m"])
    spec, workers, restarts = command_of(*words)
    assert (workers, restarts, ignored) == (8, 0, [])
    assert spec.fields == {"script": "train.py", "kind": "file", "args": "--lr 0.1 --name=x -m"}
    assert config_of(*words).run_name == "train"


def test_underscores_ranges_modules_and_overrides() -> None:
    given = "--nproc_per_node=2 --nnodes=1:4 --max-restarts 3 --rdzv_backend=c10d --standalone cluster.queue=false"
    words, ignored = torchrun_overrides([*given.split(), "name=mine", "-m", "pkg.train", "it's", "$HOME"])
    spec, workers, restarts = command_of(*words)
    assert (workers, restarts, ignored) == ((2, 8), 3, ["--standalone", "--rdzv-backend"])
    job = Script(**spec.fields)
    assert job.command("python") == ["python", "-m", "pkg.train", "it's", "$HOME"]
    assert config_of(*words).run_name == "mine"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--lr", "0.003", "--name", "x"], "job.args=--lr 0.003 --name x"),
        (["--lr=0.1"], "job.args='--lr=0.1'"),
        (["x", "-1"], "job.args='x -1'"),
    ],
)
def test_arguments_have_quotes_only_if_they_need_them(args: list[str], word: str) -> None:
    words, _ = torchrun_overrides(["train.py", *args])
    assert word in words
    assert Script(**command_of(*words)[0].fields).command("python") == ["python", "train.py", *args]


def test_the_name_of_a_run_has_the_arguments_of_its_script() -> None:
    words, _ = torchrun_overrides(["--nproc-per-node=2", "name=mine", "seed=3", "train.py", "--lr", "0.003", "--key=x"])
    job = Script(**command_of(*words)[0].fields)
    assert settings_for_name(words, job, Redactor()) == "lr=0.003 key=x strategy=script num_workers=2 ..."


def test_two_dashes_end_the_options() -> None:
    words, _ = torchrun_overrides(["--nproc-per-node=2", "--", "train.py", "--", "x"])
    assert Script(**command_of(*words)[0].fields).command("python") == ["python", "train.py", "--", "x"]


def test_several_nodes_are_those_of_a_cluster() -> None:
    words, _ = torchrun_overrides(["--nnodes", "4", "--nproc-per-node", "8", "train.py"])
    assert {"cluster=auto", "strategy.num_workers=32"} <= {*words}
    words, _ = torchrun_overrides(["--nnodes", "4", "--nproc-per-node", "8", "cluster=local", "train.py"])
    assert [word for word in words if word.startswith("cluster")] == ["cluster=local"]
    assert "cluster=auto" not in torchrun_overrides(["--nnodes", "1:4", "--nproc-per-node", "8", "train.py"])[0]


def test_another_program() -> None:
    words, _ = torchrun_overrides(["--nproc-per-node=gpu", "--no-python", "bash", "run.sh"])
    spec, workers, _ = command_of(*words)
    assert workers == "auto"
    assert Script(**spec.fields).command("python") == ["bash", "run.sh"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "which script?"),
        ("--nproc-per-node x t.py", "--nproc-per-node=x: expected"),
        ("--nnodes 0 t.py", "--nnodes=0: expected"),
        ("--nnodes 2 --nproc-per-node gpu t.py", "give a number"),
        ("--num_processes 2 t.py", "--num_processes: no option of torchrun; use --nproc-per-node\n"),
        ("--num-machines=2 t.py", "--num-machines: no option of torchrun; use --nnodes=2\n"),
        ("--multi_gpu t.py", "--multi_gpu: no option of torchrun; leave it out, because --nproc-per-node says"),
        ("--mixed_precision=fp16 t.py", "the script chooses its precision itself"),
        ("--nproc_per_nod=2 t.py", "did you mean --nproc-per-node?"),
        (
            "--nproc-per-node=2 --max_restart=1 t.py",
            "--max_restart: no option of torchrun; did you mean --max-restarts?",
        ),
        (
            "--wandb t.py",
            "--wandb: no option of torchrun; use tracking.sinks=[wandb]; options of torchrun stand before",
        ),
        (
            "--lr=0.1 t.py",
            "--lr: no option of torchrun; options of torchrun stand before the script, those of the script",
        ),
        ("--max-restarts=x t.py", "invalid int value: 'x'"),
    ],
)
def test_what_torchrun_would_not_take(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("none.py", None, "job.script=none.py: no such file"),
        ("run.sh", "echo", "job.script=run.sh: no Python file"),
        ("bad.py", "def f(:", "job.script=bad.py, line 1: Python cannot compile it"),
        ("null.py", "\0", "job.script=null.py"),
        ("good.py", "x = 1", None),
    ],
)
def test_a_script_is_checked_before_anything_starts(
    name: str, text: str | None, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    words = ["strategy=script", f"job.script={name}", "tracking=none", "strategy.num_workers=2"]
    if error is None:
        assert check_all([words])[0].config.job_name == "script"
        return
    with pytest.raises(ConfigError) as refused:
        check_all([words])
    (line,) = refused.value.errors
    assert line.startswith(error)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["strategy=script", "job=digits"], "it runs job.script, not job=digits"),
        (["strategy=ddp", "job=script", "job.script=s.py"], "only strategy=script runs it"),
        (["strategy=script"], "job.script"),
        (
            ["strategy=script", "job.script=s.py", "train.steps=5"],
            "train.steps=5: strategy=script runs the script's own loop",
        ),
        (["strategy=script", "job.script=s.py", "job.args='a \"b'"], "a shell could not read it"),
        (["strategy=script", "job.script=s.py", "job.kind=binary"], "expected file, module or program"),
    ],
)
def test_script_and_strategy_belong_together(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.py").touch()
    with pytest.raises(ConfigError) as refused:
        check_all([[*words, "tracking=none"]])
    assert error in "\n".join(refused.value.errors)
