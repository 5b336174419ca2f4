"""The command `orchestrator`: its verbs, its help, and its answers to mistakes."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import cli

WIDTH = 100
SCRIPTS = pytest.mark.needs("scripts")


def test_help_of_the_command_lists_every_verb_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, verb in cli.VERBS.items():
        assert any(line.split() == [name, *verb.summary.split()] for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.slow
def test_the_command_without_a_verb_is_launch(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["strategy=ddpp"], ["launch", "strategy=ddpp"], ["-m", "strategy=ddpp,single"]):
        assert cli.main(words) == 2
        assert "strategy=ddpp: unknown; did you mean ddp?" in capsys.readouterr().err
    assert cli.main(["--help", "job=gpt"]) == 0
    assert "job.size=tiny" in capsys.readouterr().out


@pytest.mark.needs("tracking")
def test_a_plan_shows_the_warnings_of_the_run_and_what_the_environment_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    words = [f"output_dir={tmp_path}", "name=mine", "strategy=single", "resume=auto", "plan=true"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "  warning: resume=auto: no unfinished run is named mine" in shown
    assert "  note: MLflow: MLFLOW_TRACKING_URI=http://127.0.0.1:1\n" in shown


def test_the_command_runs_the_verb_with_the_other_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("show", "logs"):
        assert cli.main([verb, str(tmp_path)]) == 2
        assert f"{verb}: {tmp_path}: no such run" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_is_a_module_with_a_main(verb: str) -> None:
    assert callable(importlib.import_module(cli.VERBS[verb].module).main)
    assert cli.VERBS[verb].module == f"orchestrator.{verb.replace('-', '_')}"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("evalaute", "did you mean evaluate?"),
        pytest.param("batch_size", "did you mean batch-size?", marks=pytest.mark.needs("batch_size")),
        ("resume", "use resume=last, or resume=<run> (configuration keys"),
        ("continue", "use resume=last, "),
        ("zzz", f"valid: {min(cli.VERBS)}, "),
        ("train", "to train a job, `orchestrator launch job=<name>`"),
        pytest.param(
            "fit blobs.py",
            "to run a script, `orchestrator torchrun blobs.py`; for a job in it, job=<module>.<class>",
            marks=SCRIPTS,
        ),
        pytest.param("python blobs.py", "to run a script, `orchestrator torchrun blobs.py`", marks=SCRIPTS),
        pytest.param("blobs.py", "to run a script, `orchestrator torchrun blobs.py`", marks=SCRIPTS),
        ("shwo blobs.py", "did you mean show?"),
    ],
)
def test_an_unknown_verb_is_refused_with_the_nearest(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    word, *rest = words.split()
    assert cli.main([word, *rest, "--last", "5"]) == 2
    output = capsys.readouterr()
    assert f"orchestrator {word}: unknown verb; {hint}" in output.err
    assert not output.out


def test_python_m_orchestrator_is_the_command(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "orchestrator", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{cli.help_text()}\n"), done.stderr


def test_help_of_the_command_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    code = """
import sys
from orchestrator.cli import main
code = main(["--help"])
heavy = {"torch", "ray", "hydra", "omegaconf", "mlflow", "rich", "numpy"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_launch_does_not_search_for_garbage_when_it_exits() -> None:
    """The interpreter would search all objects of torch for a second, between the last line and the prompt."""
    script = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from orchestrator.launch import main\n"
        "sys.exit(main(['--restarts=no']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (2, "True\n"), done.stderr
