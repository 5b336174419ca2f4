import contextlib
import itertools
import json
import math
import resource
import subprocess
import sys
import threading

import pytest

from helpers.records.recorder import Recorder
from orchestrator.config.redact import Redactor
from orchestrator.driver.process.run_context import EventStream
from orchestrator.protocol.events import (
    Continued,
    MetricsLogged,
    RankProgress,
    RunEnded,
    RunStarted,
    SampleSaved,
    SystemMetricsLogged,
    Warned,
)
from orchestrator.records.journal import Journal, read_ending, read_metrics, read_samples
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import progress_of
from orchestrator.records.storable_names import metric_name


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path)


def point(step, **metrics):
    return MetricsLogged(step=step, metrics={k.replace("__", "/"): v for k, v in metrics.items()})


def started(**fields):
    return RunStarted(name="n", run_dir="d", strategy="ddp", job="digits", world_size=2, steps=5, **fields)


def ended(status, **summary):
    return RunEnded(status=status, exit_code=0, reason="", summary=summary)


def steps(run_dir, name):
    return [step for step, _, metrics in read_metrics(run_dir) if name in metrics]


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def largest_file(size):
    """Files of this process cannot grow beyond ``size`` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_points_and_events_stand_one_a_line_in_their_files(run_dir):
    journal = Journal(run_dir)
    journal.emit(started())
    journal.emit(MetricsLogged(step=10, time=5.0, metrics={"train/loss": 2.5, "train/lr": 0.1}))
    journal.emit(RankProgress(rank=0, step=1, phase="train"))
    journal.close()
    assert lines(run_dir.metrics_file) == [{"step": 10, "time": 5.0, "train/loss": 2.5, "train/lr": 0.1}]
    (event,) = lines(run_dir.events_file)
    assert (event["event"], event["world_size"]) == ("run_started", 2)
    assert list(read_metrics(run_dir)) == [(10, 5.0, {"train/loss": 2.5, "train/lr": 0.1})]


def test_lines_are_on_disk_as_soon_as_they_are_emitted(run_dir):
    Journal(run_dir).emit(point(1, loss=1.0))
    assert steps(run_dir, "loss") == [1]


def test_nan_and_infinities_are_strict_json_and_read_back_as_numbers(run_dir):
    journal = Journal(run_dir)
    journal.emit(point(1, a=math.nan, b=math.inf, c=-math.inf))
    journal.emit(ended("FAILED", final_loss=math.nan, parts={"x": [math.inf]}))
    assert {k: v for k, v in lines(run_dir.metrics_file)[0].items() if k in "abc"} == {
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
    }
    assert lines(run_dir.events_file)[0]["summary"] == {"final_loss": "NaN", "parts": {"x": ["Infinity"]}}
    ((_, _, metrics),) = read_metrics(run_dir)
    assert math.isnan(metrics["a"])
    assert (metrics["b"], metrics["c"]) == (math.inf, -math.inf)


def test_resume_writes_nothing_at_or_below_the_last_step_of_each_metric(run_dir):
    journal = Journal(run_dir)
    for step in (1, 2, 3):
        journal.emit(point(step, train__loss=float(step)))
    journal.emit(point(2, val__loss=9.0))
    journal.close()
    journal = Journal(run_dir)
    for step in (2, 3, 4):
        journal.emit(point(step, train__loss=-1.0, val__loss=-1.0))
    assert steps(run_dir, "train/loss") == [1, 2, 3, 4]
    assert steps(run_dir, "val/loss") == [2, 3, 4]


def test_a_sample_is_kept_once_for_each_step_also_after_a_resume(run_dir):
    def save(journal, *steps):
        for step in steps:
            for name in ("a", "b"):
                journal.emit(SampleSaved(step=step, time=float(step), name=name, path=f"samples/{step}-{name}.png"))

    journal = Journal(run_dir)
    save(journal, 10, 20)
    save(journal, 20, 30)  # after a recovery
    journal.close()
    journal = Journal(run_dir)
    save(journal, 20, 30, 40)
    journal.close()
    found = [sample for sample, _ in read_samples(run_dir)]
    assert [(s.name, s.step, s.time) for s in found] == [(n, s, float(s)) for s in (10, 20, 30, 40) for n in ("a", "b")]
    assert found[0].path == run_dir.path / "samples" / "10-a.png"


def test_system_readings_go_on_counting_after_a_resume(run_dir):
    for _ in range(2):
        journal = Journal(run_dir)
        for step in (0, 1):
            journal.emit(SystemMetricsLogged(step=step, metrics={"system/node_0/cpu": 1.0}))
        journal.close()
    assert steps(run_dir, "system/node_0/cpu") == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"step": 2, "ti', b"\0" * 70_000, b"{"])
def test_a_torn_last_line_is_cut_off(run_dir, torn):
    journal = Journal(run_dir)
    journal.emit(point(1, loss=1.0))
    journal.emit(Warned(message="first"))
    journal.close()
    for path in (run_dir.metrics_file, run_dir.events_file):
        with path.open("ab") as file:
            file.write(torn)
    assert steps(run_dir, "loss") == [1]
    journal = Journal(run_dir)
    journal.emit(point(2, loss=2.0))
    journal.emit(Warned(message="second"))
    assert steps(run_dir, "loss") == [1, 2]
    assert [e["message"] for e in lines(run_dir.events_file)] == ["first", "second"]


def test_a_journal_killed_in_mid_write_keeps_every_whole_line(run_dir):
    script = (
        "import sys; from pathlib import Path; from orchestrator.records.run_dir import RunDir\n"
        "from orchestrator.records.journal import Journal; from orchestrator.protocol.events import MetricsLogged\n"
        "journal, step = Journal(RunDir(Path(sys.argv[1]))), 0\n"
        "while True:\n    step += 1\n    journal.emit(MetricsLogged(step=step, metrics={'loss': 0.5}))\n"
        "    if step == 500: print('x', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(run_dir.path)], stdout=subprocess.PIPE)
    child.stdout.readline()
    child.kill()
    child.wait(timeout=60)
    child.stdout.close()
    Journal(run_dir).close()
    found = steps(run_dir, "loss")
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= 500


def test_a_full_disk_does_not_stop_training_warns_once_and_loses_no_line(run_dir):
    warnings = []
    journal = Journal(run_dir, warn=warnings.append)
    journal.emit(point(1, loss=1.0))
    with largest_file(run_dir.metrics_file.stat().st_size + 60):  # amid the second line
        for step in (2, 3, 4):
            journal.emit(point(step, loss=1.0))
        while_full = run_dir.metrics_file.read_bytes()
    assert while_full.endswith(b"\n")
    journal.emit(point(5, loss=1.0))
    assert steps(run_dir, "loss") == [1, 2, 3, 4, 5]
    (warning,) = warnings
    assert "disk space" in warning


def test_a_journal_that_another_process_continues_is_left_as_it_is(run_dir):
    journal = Journal(run_dir)
    journal.emit(point(1, loss=1.0))
    written = run_dir.metrics_file.read_bytes()
    with largest_file(len(written)):
        journal.emit(point(2, loss=1.0))
    journal.discard()
    journal.close()
    assert run_dir.metrics_file.read_bytes() == written


def test_a_warning_may_be_emitted_to_the_journal_that_gives_it(run_dir):
    journal = Journal(run_dir, warn=lambda text: journal.emit(Warned(message=text)))
    with largest_file(1000):
        journal.emit(point(1, **{f"metric_{i}": 1.0 for i in range(100)}))
    assert "training continues" in lines(run_dir.events_file)[0]["message"]


def test_threads_may_emit_at_the_same_time(run_dir):
    journal = Journal(run_dir)

    def emit(name):
        for step in range(200):
            journal.emit(point(step, **{name: 1.0}))

    threads = [threading.Thread(target=emit, args=(f"m{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(list(read_metrics(run_dir))) == 800


def test_secrets_are_masked_on_the_way_to_the_journal(run_dir):
    journal = EventStream([Journal(run_dir)], Redactor(["hunter2"]))
    journal.emit(Warned(message="login with hunter2 at https://me:open-sesame@host"))
    journal.emit(ended("FINISHED", val_token=0.5, steps=5))
    journal.emit(point(1, **{"val/token": 0.5, "val/hunter2": 1.0}))
    warned, run_ended = (json.loads(line) for line in run_dir.events_file.read_text().splitlines())
    assert warned["message"] == "login with *** at https://***@host"
    assert run_ended["summary"] == {"val_token": 0.5, "steps": 5}, "metrics are never secrets"
    assert next(read_metrics(run_dir))[2] == {"val/token": 0.5, "val/_x2a__x2a__x2a_": 1.0}


def test_secrets_are_masked_once_for_all_sinks():
    sinks = [Recorder(), Recorder()]
    EventStream(sinks, Redactor(["hunter2"])).warn("login with hunter2")
    first, second = (sink.seen for sink in sinks)
    assert first[0].message == "login with ***"
    assert first[0] is second[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train/loss", "train/loss"),
        ("val/top-1 acc.", "val/top-1 acc."),
        ("hit@1", "hit_x40_1"),
        ("acc/猫", "acc/_x732b_"),
        ("loss_x40_", "loss_x5f_x40_"),
        ("/a//b/../c", "_x2f_a_x2f_/b/_x2e_./c"),
        ("train/step", "train/step"),
        ("step", "_step"),
    ],
)
def test_metric_names_are_what_mlflow_accepts(given, expected):
    assert metric_name(given) == expected


def test_no_two_names_become_one_and_mlflow_takes_each():
    from mlflow.utils.validation import _validate_metric_name

    names = ["".join(letters) for length in range(1, 6) for letters in itertools.product("_x4@猫/.", repeat=length)]
    names += ["step", "_step", "__step", "time", "_time", "continues", *(f"{'x' * 300}{end}" for end in "ab"), "\udcff"]
    stored = {metric_name(name): name for name in names}
    assert len(stored) == len(names)
    for name in stored:
        _validate_metric_name(name)


def test_a_run_that_continues_from_an_earlier_step_has_one_curve(run_dir):
    journal = Journal(run_dir)
    journal.emit(started())
    for step in range(1, 8):
        journal.emit(point(step, train__loss=1.0, **({"val__loss": 1.0} if step % 2 == 0 else {})))
    journal.emit(point(7, recovery__seconds=3.0))
    journal.emit(SampleSaved(step=4, name="a", path="samples/4.png"))
    journal.emit(SampleSaved(step=7, name="a", path="samples/7.png"))
    journal.emit(SystemMetricsLogged(step=9, metrics={"system/node_0/cpu": 1.0}))
    journal.emit(Continued(step=4))
    assert progress_of(run_dir) == {"steps": 4, "final_loss": 1.0, "val_loss": 1.0}
    journal.emit(point(4, train__loss=2.0))
    journal.emit(point(5, train__loss=2.0))
    journal.close()
    journal = Journal(run_dir)  # another driver, with other steps to log
    journal.emit(started(resumed_from_step=4))
    for step in (4, 6, 8):
        journal.emit(point(step, train__loss=3.0))
    journal.emit(SampleSaved(step=6, name="a", path="samples/6.png"))
    journal.emit(started(resumed_from_step=2, source="another run"))
    journal.close()
    losses = [(step, metrics["train/loss"]) for step, _, metrics in read_metrics(run_dir) if "train/loss" in metrics]
    assert losses == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (6, 3.0), (8, 3.0)]
    assert steps(run_dir, "val/loss") == [2, 4]
    assert steps(run_dir, "recovery/seconds") == [7]
    assert steps(run_dir, "system/node_0/cpu") == [9]
    assert [sample.step for sample, _ in read_samples(run_dir)] == [4, 6]
    assert progress_of(run_dir) == {"steps": 8, "final_loss": 3.0, "val_loss": 1.0}


def test_a_run_that_repeats_nothing_discards_nothing(run_dir):
    journal = Journal(run_dir)
    journal.emit(point(5, train__loss=1.0))
    journal.emit(Continued(step=5))
    journal.close()
    assert lines(run_dir.metrics_file) == [
        {"step": 5, "time": lines(run_dir.metrics_file)[0]["time"], "train/loss": 1.0}
    ]


def test_the_ending_is_that_of_the_last_start(run_dir):
    journal = Journal(run_dir)
    assert read_ending(run_dir) == (None, 0)
    for event in (started(), ended("KILLED"), started()):
        journal.emit(event)
    ending, offset = read_ending(run_dir)
    assert ending is None
    journal.emit(ended("FINISHED", steps=5))
    ending, _ = read_ending(run_dir, offset=offset, before=ending)
    assert (ending.status, ending.summary) == ("FINISHED", {"steps": 5})
