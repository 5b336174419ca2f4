"""``--help`` and tab completion: quick, complete, and readable on a small terminal."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from helpers.machines.plans import config_of
from orchestrator import cli
from orchestrator.config.files import GROUPS, choices
from orchestrator.config.help import help_text
from orchestrator.launch import main
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 100


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A console script as pip installs it for ``orchestrator.cli:main``."""
    path = tmp_path_factory.mktemp("bin") / "orchestrator"
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom orchestrator.cli import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return path


def command(script: Path, *words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_names_every_group_word_and_key() -> None:
    text = help_text([], registry.config_class)
    config = config_of()
    for group in GROUPS:
        assert all(word in text for word in choices(group)), group
    for section in fields(config):
        value = getattr(config, section.name)
        if section.name != "job" and is_dataclass(value):
            for field in fields(registry.config_class("ddp") if section.name == "strategy" else value):
                if "meaning" in field.metadata:
                    assert f"\n  {section.name}.{field.name}=" in text
        elif section.name != "job":
            assert f"\n  {section.name}=" in text


def test_help_shows_the_fields_of_the_chosen_job_and_strategy() -> None:
    text = help_text(["job=gpt", "strategy=single", "job.layers=7", "train.steps=3"], registry.config_class)
    assert "job.layers=7" in text
    assert "job.size=tiny" in text
    assert "job.path=null" in text
    assert "train.steps=3 " in text
    assert "comm_hook" not in text
    assert "job.hidden=512" in help_text([], registry.config_class)


def test_help_for_a_job_that_cannot_be_found_is_still_help() -> None:
    assert "job.<field>" in help_text(["job._target_=nowhere.Mine"], registry.config_class)


def test_help_lists_the_words_of_a_choice() -> None:
    assert "(none, bf16, fp16, powersgd)" in " ".join(help_text([], registry.config_class).split())


def test_help_fits_a_terminal_and_has_the_used_keys_before_the_rare_ones() -> None:
    text = help_text(["job=gpt"], registry.config_class)
    assert max(map(len, text.splitlines())) <= WIDTH
    order = [text.index(f"\n  {key}") for key in ("seed=", "train.steps=", "strategy.num", "job.<", "cluster.heart")]
    assert order == sorted(order)


@pytest.mark.needs("asynchronous", "scripts")
def test_help_with_a_mistake_beside_it_says_so(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert main(["--help", "strategy=ddpp"]) == 2
    golden.says(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--hepl", "unknown option; did you mean --help"),
        ("--multi-run", "unknown option; did you mean --multirun"),
        ("-x", "unknown option; valid: "),
        ("--resume", "keys are written key=value; use resume=last, or resume=<run>"),
        ("--resume=last", "keys are written key=value; use resume=last, or resume=<run>"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(
    option: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([option, "strategy=ddp"]) == 2
    output = capsys.readouterr()
    assert f"{option}: {near}" in output.err
    assert not output.out


@pytest.mark.slow
def test_help_imports_the_chosen_strategy_and_neither_ray_nor_mlflow(tmp_path: Path) -> None:
    code = """
import sys
from orchestrator.launch import main
from orchestrator.records.run_dir import RunDir
code = main(["--help"])
heavy = {"ray", "mlflow", "sklearn", "torch.distributed.pipelining"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "strategy=ddp" in done.stdout


def complete(script: Path, line: str, cwd: Path, *, shell: str = "bash") -> list[str]:
    done = command(script, "-sc", f"query={shell}", cwd=cwd, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("strategy=", [f"strategy={name}" for name in choices("strategy")]),
        ("-m strategy=si", ["strategy=single"]),
        ("strategy=single train.st", ["train.steps=", "train.stop_after=", "train.stop_min_delta="]),
        ("strategy=ddp strategy.comm", ["strategy.comm_hook="]),
        ("cluster.add", ["cluster.address="]),
        ("launch strategy=f", ["strategy=fsdp", "strategy=fsdp_pipeline"]),
        pytest.param("comp", ["compare"], marks=pytest.mark.needs("sweep")),
        pytest.param(
            "s",
            [
                *("schema", "seed=", "show", "start_from=", "stop", "storage.", "strategy.", "strategy=", "submit"),
                *("sweep.", "sync"),
            ],
            marks=pytest.mark.needs("submit"),
        ),
        ("strategy=ddp comp", []),
        ("compare out", []),
    ],
)
def test_tab_completes_verbs_groups_and_keys(script: Path, typed: str, offered: list[str], tmp_path: Path) -> None:
    assert complete(script, f"orchestrator {typed}", tmp_path) == offered


@pytest.fixture
def with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a job and two runs, in a home without any."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom orchestrator import Job\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Line(Job):\n    width: int = 3\n    lr: float = 0.1\n"
    )
    for output, name in (("outputs", "12-30-01-alice"), ("outputs", "12-31-01-two words"), ("far", "12-30-01-bob")):
        RunDir(tmp_path / output / "2026-05-01" / name).path.mkdir(parents=True)
        RunDir(tmp_path / output / "2026-05-01" / name).update_record(name="alice")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("job=mine.Line job.", ["job._target_=", "job.lr=", "job.width="]),
        ("job=mine.Line train.eval_e", ["train.eval_every="]),
        ("job.m", ["job.momentum="]),
        pytest.param(
            "submit --address http://h:1 job=mine.Line job.w", ["job.width="], marks=pytest.mark.needs("submit")
        ),
        ("show ", ["12-30-01-alice", "alice", "last"]),
        ("logs --output-dir far b", ["bob"]),
        ("stop --", []),
        ("runs ", []),
        ("-m resume=a", ["resume=alice", "resume=auto"]),
        ("output_dir=far strategy=ddp evaluate=", ["evaluate=12-30-01-bob", "evaluate=bob", "evaluate=last"]),
        ("output_dir=memory://b/runs start_from=", ["start_from=last"]),
        ("resume=outputs/", []),
    ],
)
def test_tab_completes_fields_of_a_job_and_runs(
    typed: str, offered: list[str], with_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", f"orchestrator {typed}")
    monkeypatch.setattr("sys.argv", ["orchestrator", "-sc", "query=bash"])
    assert cli.main() == 0
    assert capsys.readouterr().out.split() == offered


@pytest.mark.slow
def test_tab_completes_files_of_the_user(script: Path, tmp_path: Path) -> None:
    for directory in ("conf/job", "other/job"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / f"{directory[:4]}_line.yaml").write_text("_target_: jobs.toy.Toy\nsamples: 3\n")
    assert complete(script, "orchestrator job=conf_", tmp_path) == ["job=conf_line"]
    assert complete(script, "orchestrator job=conf_line job.sa", tmp_path) == ["job.samples="]
    assert complete(script, "orchestrator --config-dir other job=othe", tmp_path) == ["job=othe_line"]


@pytest.mark.slow
def test_tab_offers_every_verb_and_group_as_the_first_word(script: Path, tmp_path: Path) -> None:
    for shell in ("bash", "fish"):
        offered = complete(script, "orchestrator ", tmp_path, shell=shell)
        assert {*cli.VERBS, *(f"{group}=" for group in GROUPS)} <= set(offered)
    assert not {*cli.VERBS} & {*complete(script, "orchestrator launch ", tmp_path)}


@pytest.mark.slow
def test_bash_completes_after_what_the_help_says_to_type(script: Path, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    commands = f"""
export PYTHONPATH={ROOT} PATH={script.parent}:$PATH
eval "$(orchestrator --shell-completion install=bash)"
complete -p orchestrator
COMP_WORDS=(orchestrator train.st); COMP_CWORD=1; COMP_LINE="orchestrator train.st"; COMP_POINT=21
hydra_bash_completion
echo "offered: ${{COMPREPLY[*]}}"
"""
    assert command(script, "--help", cwd=tmp_path).returncode == 0
    done = subprocess.run([bash, "--norc", "-c", commands], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "offered: train.steps=" in done.stdout, done.stderr


def test_python_itself_is_not_given_our_completion(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "orchestrator.launch", "--shell-completion", "install=bash"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "`orchestrator` command" in done.stderr
