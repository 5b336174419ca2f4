"""What the user of a run may type next, on the machine of its driver or elsewhere."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.compat.ray_job import JOB_CONFIG_VARIABLE
from orchestrator.config.redact import Redactor
from orchestrator.driver.ending import compare_command
from orchestrator.driver.preflight.record import command_line
from orchestrator.driver.process.origin import (
    ADDRESSED_VERBS,
    HERE,
    NO_PY_MODULES,
    Origin,
    origin_of_submission,
    this_origin,
    who_asks,
)
from orchestrator.driver.process.signals import stop_wait_warning
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.remote import Remote

LAPTOP = origin_of_submission(
    ["cluster.py_modules=[old.py]", "cluster.py_modules=[mine.py]"],
    given_address="http://head:8265",
    address="http://head:8265",
    working_dir="code",
    restarts=3,
    ray=("RAY_AUTH_MODE=token", "ray"),
)


def again(origin: Origin, *overrides: str) -> list[str]:
    return shlex.split(command_line(overrides, Redactor(), origin=origin))


def test_on_the_machine_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert again(HERE, "strategy=ddp") == ["python", "-m", "orchestrator.launch", "strategy=ddp"]
    assert compare_command(HERE, OutputDir(tmp_path / "outputs")) == "orchestrator compare --last 5"
    elsewhere = compare_command(HERE, OutputDir(Path("/shared/runs")))
    assert elsewhere == "orchestrator compare --last 5 --output-dir /shared/runs"


def test_a_submitted_job_is_submitted_again_as_it_was() -> None:
    submit = ["orchestrator", "submit", "--address", "http://head:8265", "--working-dir", "code", "--restarts", "3"]
    assert again(LAPTOP, "strategy=ddp", NO_PY_MODULES) == [*submit, "strategy=ddp", "cluster.py_modules=[mine.py]"]
    plain = origin_of_submission(
        ["strategy=ddp"],
        given_address=None,
        address="http://127.0.0.1:8265",
        working_dir=".",
        restarts=None,
        ray=["ray"],
    )
    assert again(plain, "strategy=ddp", "resume=/r") == ["orchestrator", "submit", "strategy=ddp", "resume=/r"]


def test_what_reads_the_runs_of_a_submitted_job_finds_the_cluster_or_is_sent_there() -> None:
    assert compare_command(LAPTOP, OutputDir(Path("/home/ada/orchestrator/outputs"))) == (
        "orchestrator compare --last 5 --output-dir /home/ada/orchestrator/outputs --no-picture "
        "--address http://head:8265"
    )
    assert LAPTOP.verb("sync", "/runs/a") == (
        "RAY_AUTH_MODE=token ray job submit --address http://head:8265 --working-dir code -- "
        "python -m orchestrator.sync /runs/a"
    )


def test_the_log_of_a_rank_is_a_file_of_the_user_or_the_command_that_shows_it() -> None:
    """On a store, each node has a folder of its own for its logs."""
    here, stored = RunDir(Path("/runs/a")), RunDir(Path("/staging/a"), Remote("s3://bucket/a", 1.0))
    assert HERE.log(here, 1) == "/runs/a/logs/rank-1.log"
    assert HERE.log(stored, 1) == "orchestrator logs s3://bucket/a --rank 1"
    assert LAPTOP.log(here, 1) == "orchestrator logs /runs/a --rank 1 --address http://head:8265"


@pytest.mark.parametrize("verb", [verb for verb in ADDRESSED_VERBS if verb in cli.VERBS])
def test_a_verb_with_an_address_has_the_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    assert "--address ADDRESS" in capsys.readouterr().out


def test_a_job_knows_where_it_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (JOB_CONFIG_VARIABLE, "RAY_AUTH_MODE", *LAPTOP.variables()):
        monkeypatch.delenv(name, raising=False)
    assert this_origin() == HERE
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, json.dumps({"metadata": {"job_submission_id": "digits-1122"}}))
    by_ray = this_origin()
    assert again(by_ray, "strategy=ddp")[:4] == ["ray", "job", "submit", "--working-dir"]
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert again(this_origin(), "strategy=ddp")[:3] == ["RAY_AUTH_MODE=token", "ray", "job"]
    assert again(by_ray, "strategy=ddp")[-4:] == ["python", "-m", "orchestrator.launch", "strategy=ddp"]
    laptop = replace(LAPTOP, user="ada on laptop")
    for name, value in laptop.variables().items():
        monkeypatch.setenv(name, value)
    assert this_origin() == laptop
    assert who_asks() == "ada on laptop"


def test_a_job_that_ray_would_kill_too_soon() -> None:
    assert stop_wait_warning(10, {"RAY_JOB_STOP_WAIT_TIME_S": "20"}) is None
    for environment, wait_s in (({}, 3), ({"RAY_JOB_STOP_WAIT_TIME_S": "19"}, 19)):
        warning = stop_wait_warning(9.5, environment)
        assert f"kills this job after {wait_s} s" in warning
        assert "RAY_JOB_STOP_WAIT_TIME_S=20" in warning
