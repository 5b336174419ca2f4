"""`orchestrator runs` and `orchestrator show` on real run directories."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.files.golden import Golden, sections
from orchestrator import cli, runs, show
from orchestrator.compat.ray_job import JOB_CONFIG_VARIABLE
from orchestrator.driver.process.origin import Origin
from orchestrator.protocol.core_metrics import LOSS, SAMPLES_PER_S
from orchestrator.protocol.events import (
    CheckpointSaved,
    MetricsLogged,
    Recovered,
    RunEnded,
    SystemMetricsLogged,
    WorkerFailed,
    WorkerLost,
)
from orchestrator.records.journal import Journal
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import RunDir

NOBODY = {**this_process(), "pid": 2**22 - 1}
CHECKPOINT = CheckpointSaved(step=400, path="/c/step-00000400", seconds=0.1, stall_ms=1.0, size_bytes=2_100_000)
COMMAND = "python -m orchestrator.launch strategy=ddp resume=old"


def make_run(output_dir: Path, name: str, **record: Any) -> RunDir:
    path = output_dir / "2026-05-01" / name
    (path / "logs").mkdir(parents=True)
    run_dir = RunDir(path)
    plan = {"strategy": "ddp", "job": "digits", "steps": 500, "global_batch_size": 64, "world_size": 2, "device": "cpu"}
    given = {
        "name": "digits-ddp",
        "state": "finished",
        "driver": NOBODY,
        "strategy": "ddp",
        "job": "digits",
        "command": COMMAND,
        "plan": {**plan, "mesh": {"data_parallel_size": 2}},
        "started": time.time() - 7200,
        "ended": time.time() - 7100,
        "summary": {"samples_per_s": 7628.0, "final_loss": 0.0015, "steps": 500, "limit": "limited by computation"},
    }
    run_dir.update_record(**{**given, **record})
    return run_dir


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    make_run(tmp_path, "12-30-01-digits-ddp")
    make_run(tmp_path, "12-31-01-digits-ddp", state="running")
    running = make_run(tmp_path, "12-32-01-digits-ddp", state="running", driver=this_process(), summary={})
    running.update_record(params={"train.steps": 8000})
    journal = Journal(running)
    for step in range(1, 6001):
        journal.emit(MetricsLogged(step=step, metrics={LOSS.name: 8.0 / step, SAMPLES_PER_S.name: 100.0 * step}))
    journal.emit(SystemMetricsLogged(step=9000, metrics={"system/node_0/cpu_pct": 50.0}))
    journal.close()
    return tmp_path


def test_runs_are_listed_with_their_state_the_newest_first(
    output_dir: Path, golden: Golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (output_dir / "2026-05-01" / "12-33-01-x").mkdir()
    (output_dir / "2026-05-01" / "12-33-01-x" / "run.json").write_text("{")
    assert runs.main(["--output-dir", str(output_dir)]) == 0
    printed = capsys.readouterr()
    golden("report/runs", printed.out)
    assert "12-33-01-x/run.json is damaged: " in printed.err
    monkeypatch.setenv("COLUMNS", "60")
    assert runs.main(["--output-dir", str(output_dir), "--last", "1"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
    assert runs.main(["--output-dir", str(output_dir), "--state", "died", "--json"]) == 0
    assert [run["run"] for run in json.loads(capsys.readouterr().out)] == ["2026-05-01/12-31-01-digits-ddp"]


def unreadable(record: Path) -> None:
    """Let every read of the file fail, for root too."""
    record.unlink()
    record.symlink_to("/proc/self/mem")


@pytest.mark.parametrize(
    "damage",
    [
        *[(lambda record, text=text: record.write_text(text)) for text in (
            "",
            "[" * 200_000,
            '{"state": "running", "driver": "me"}',
            '{"state": "running", "driver": null, "summary": null}',
            '{"plan": {"mesh": {"data_parallel_size": "two"}}, "params": null, "started": null}',
            '{"summary": "all well"}',
        )],
        unreadable,
    ],
)  # fmt: skip
def test_one_damaged_record_hides_no_other_run(
    damage: Callable[[Path], None], output_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = make_run(output_dir, "12-40-01-digits-ddp").record_file
    damage(damaged)
    for verb in cli.VERBS.keys() & {"runs", "compare"}:
        assert cli.main([verb, "--output-dir", str(output_dir), "--json"]) == 0
        printed = capsys.readouterr()
        assert "12-30-01-digits-ddp" in printed.out
        assert ("12-40-01-digits-ddp" in printed.out) is (str(damaged) not in printed.err)
        assert printed.err.count("\n") <= 2
    shown = show.main(["12-40-01-digits-ddp", "--output-dir", str(output_dir)])
    assert shown == 0 or str(damaged) in capsys.readouterr().err


@pytest.mark.parametrize("recorded", ["waiting", "recovering"])
@pytest.mark.parametrize("driver", [this_process(), NOBODY], ids=["alive", "dead"])
def test_a_run_without_an_end_is_shown_in_its_state_unless_its_driver_is_dead(
    driver: dict[str, Any], recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path, "12-30-01-digits-ddp", state=recorded, driver=driver)
    state = "died" if driver is NOBODY else recorded
    assert runs.main(["--output-dir", str(tmp_path), "--state", state, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == state
    assert show.main([str(run_dir.path)]) == 0
    assert f"state       {state}, started 2h00m" in capsys.readouterr().out


@pytest.mark.needs("sweep")
def test_show_tells_how_a_run_went_or_how_far_it_is_and_what_may_follow(
    output_dir: Path, golden: Golden, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(output_dir, "12-34-01-a", state="failed", mlflow_run_id="abc", tracking={"uri": "http://host"})
    (run_dir.path / "auto.md").write_text("auto chooses ddp\n")
    summary = run_dir.read_record()["summary"]
    run_dir.update_record(summary={**summary, "queue_s": 25.0, "waited_s": 5.0})
    run_dir.update_record(best={"metric": "val/loss", "step": 400, "value": 0.25})
    lost = {"rank": 1, "display_name": "rank 1", "step": 412, "traceback": "", "log": "", "log_tail": ""}
    journal = Journal(run_dir)
    journal.emit(WorkerLost(reason="SIGKILL", **lost))
    journal.emit(
        Recovered(generation=2, step=412, steps_lost=3, replaced=(1,), in_place=True, seconds=0.2, num_workers=2,
                  num_workers_before=2)
    )  # fmt: skip
    journal.emit(CHECKPOINT)
    journal.emit(RunEnded(status="FAILED", exit_code=1, reason="rank 0 failed: ValueError", summary={}))
    journal.close()
    kept, shown = run_dir.checkpoints / "step-00000400", {}
    kept.mkdir(parents=True)
    for name in ("12-34-01-a", "12-32-01-digits-ddp"):
        assert show.main([name, "--output-dir", str(output_dir)]) == 0
        shown[name] = [capsys.readouterr().out.replace(str(output_dir), "/runs").rstrip()]
    kept.rmdir()
    assert show.main(["12-34-01-a", "--output-dir", str(output_dir)]) == 0
    gone = [line for line in capsys.readouterr().out.splitlines() if line.endswith("no longer there")]
    shown["its checkpoints were removed"] = gone
    golden("report/show", sections(shown))


@pytest.mark.parametrize(
    ("command", "continued"),
    [
        ("orchestrator submit --restarts 3 strategy=ddp resume=auto", "orchestrator submit --restarts 3 strategy=ddp"),
        ("orchestrator.run(Mine, 'strategy=ddp')", None),
    ],
)
def test_show_continues_a_run_with_the_command_that_has_started_it(
    command: str, continued: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path, "a", state="killed", command=command)
    journal = Journal(run_dir)
    journal.emit(CHECKPOINT)
    journal.close()
    assert show.main(["a", "--output-dir", str(tmp_path)]) == 0
    resuming = [line[12:] for line in capsys.readouterr().out.splitlines() if f" resume={run_dir.path}" in line]
    assert resuming == ([] if continued is None else [f"{continued} resume={run_dir.path}"])


@pytest.mark.needs("sweep")
def test_the_other_commands_of_show_begin_as_where_it_was_typed(
    output_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> str:
        assert show.main(["--output-dir", str(output_dir)]) == 0
        return capsys.readouterr().out

    assert f"next        orchestrator compare --last 5 --output-dir {output_dir}" in shown()
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, json.dumps({"metadata": {"job_submission_id": "orchestrator-show-1"}}))
    for name, value in Origin(address="http://head:8265").variables().items():
        monkeypatch.setenv(name, value)
    assert f"orchestrator compare --last 5 --output-dir {output_dir} --address http://head:8265" in shown()


@pytest.mark.needs("sweep")
def test_show_tells_of_a_script_what_it_ran_and_no_steps_that_it_need_not_report(
    tmp_path: Path, golden: Golden, capsys: pytest.CaptureFixture[str]
) -> None:
    params = {"job.script": "train.py", "job.args": "--lr 0.1"}
    reason = "rank 0 failed: ValueError: x (train.py:3: main())"
    summary = {"steps": 0, "startup_s": 3.0}
    script = make_run(
        tmp_path, "12-30-01-train", strategy="script", job="script", state="failed", params=params,
        reason=reason, summary=summary, started=0.0, ended=60.0,
    )  # fmt: skip
    journal = Journal(script)
    failed = {"rank": 0, "display_name": "rank 0", "step": None, "reason": "ValueError: x (train.py:3: main())"}
    journal.emit(WorkerFailed(**failed, traceback="", log="", log_tail=""))
    journal.emit(RunEnded(status="FAILED", exit_code=1, reason=reason, summary=summary))
    journal.close()
    script.script_checkpoints.mkdir()
    (script.script_checkpoints / "last.pt").touch()
    assert show.main([str(script.path)]) == 0
    golden.says(re.sub(r"\S+ ago", "AGO", capsys.readouterr().out), HERE=tmp_path)


def test_show_finds_runs_by_path_name_and_last(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "12-30-01-digits-ddp"
    for given in (str(output_dir / "2026-05-01" / name), f"2026-05-01/{name}", name):
        assert show.main([given, "--output-dir", str(output_dir)]) == 0
        assert "state       finished" in capsys.readouterr().out
    assert show.main(["--output-dir", str(output_dir)]) == 0
    assert "state       running, started 2h00m ago" in capsys.readouterr().out
    for given, said in (("nothing", "nothing: no such run"), ("digits-dp", "did you mean digits-ddp? `orchestrator")):
        assert show.main([given, "--output-dir", str(output_dir)]) == 2
        assert said in capsys.readouterr().err


def test_show_takes_the_id_and_the_page_of_a_run_in_mlflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uid = "0123456789abcdef" * 2
    make_run(tmp_path, "12-30-01-digits-ddp", state="failed", mlflow_run_id=uid)
    make_run(tmp_path, "12-31-01-digits-ddp", mlflow_run_id="f" * 32)
    for given in (uid, f"http://127.0.0.1:5000/#/experiments/1/runs/{uid}?workflowType=machine_learning"):
        assert show.main([given, "--output-dir", str(tmp_path)]) == 0
        output = capsys.readouterr()
        assert "state       failed" in output.out
        assert not output.err
    assert show.main(["e" * 32, "--output-dir", str(tmp_path)]) == 2


def test_show_says_that_a_name_has_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = (make_run(tmp_path, f"{at}-digits-ddp") for at in ("12-30-01", "12-31-01"))
    for given, noted in (("digits-ddp", True), (str(newer.path), False), (older.path.name, False), ("last", False)):
        assert show.main([given, "--output-dir", str(tmp_path)]) == 0
        note = f"note: several runs are called digits-ddp; this is the newest, after {older.location}\n"
        assert capsys.readouterr().err == (note if noted else "")


def test_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main(["--output-dir", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().err
    assert show.main(["--output-dir", str(tmp_path)]) == 2
