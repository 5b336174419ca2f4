"""Sinks beside MLflow: TensorBoard and those of the user, fed by the real follower from real journals."""

import csv
import json
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from helpers.files.documents import PAGES, examples
from helpers.records.runs import wait_for
from helpers.records.tracked_runs import end, expected, follower_of, history, log, new_run, run_of, save_samples, start
from helpers.records.tracked_runs import tracking as tracking_to
from orchestrator.config.operation import TENSORBOARD, TrackingConfig
from orchestrator.features.tracking.sinks import Sinks, load_sink, sink_problem
from orchestrator.features.tracking.uploader import RunUploader
from orchestrator.features.tracking.wandb import nested, sync_command, why_unusable
from orchestrator.protocol.events import Continued
from orchestrator.records.ended_runs import final_ending
from orchestrator.records.journal import Ending, Journal, Point
from orchestrator.records.run_dir import RunDir

SINKS = """
import os
from pathlib import Path


class Base:
    def __init__(self, run, folder):
        self.file = open(folder / "points.txt", "w", buffering=1)
        self.file.write(f"{run['name']} {run['params']['job.password']}\\n")

    def log_points(self, points):
        for point in points:
            self.file.write(f"{point.name} {point.step} {point.value}\\n")

    def log_sample(self, sample):
        kind = sample.path.suffix
        self.file.write(f"{sample.name} {sample.step} {sample.path.read_text() if kind == '.txt' else kind}\\n")

    def close(self, status, summary):
        self.file.write(f"{status} {summary['final_loss']}\\n")
        self.file.close()


class Plain(Base):
    pass


class Raising(Base):
    def log_points(self, points):
        raise ValueError("password=hunter2 is wrong")


class Dying(Base):
    def log_points(self, points):
        os._exit(3)


class Partial:
    def log_points(self, points):
        pass
"""


UID = "0123456789abcdef" * 2


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sinks.py").write_text(SINKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_sinks", None)


def tracking(uri: str | None, *sinks: str, tensorboard: bool = False) -> TrackingConfig:
    return replace(tracking_to(uri), sinks=sinks, tensorboard=tensorboard)


def finished(tmp_path: Path, config: TrackingConfig) -> tuple[RunDir, Any]:
    """A run of five steps, with a sample at the third, whose uploads have ended."""
    run_dir = new_run(tmp_path, config.uri, params={"job.lr": 0.1, "job.password": "hunter2"})
    uploader = RunUploader.start(run_dir, config)
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 6))
    save_samples(journal, run_dir, 3)
    end(journal, run_dir, final_loss=0.2)
    journal.close()
    return run_dir, uploader.finish(200)


def lines(run_dir: RunDir, sink: str) -> list[str]:
    return (run_dir.sinks / sink / "points.txt").read_text().splitlines()


ALL = sorted(
    [
        "digits-ddp ***",
        *(f"{name} {n} {value}" for n in range(1, 6) for name, value in (("train/loss", 1 / n), ("perf/step_ms", 5.0))),
        "digits 3 .png",
        "says 3 step 3",
        "FINISHED 0.2",
    ]
)
"""In any order: a sample follows the points of its step if it is there by then."""


def test_a_sink_that_raises_costs_neither_the_others_nor_mlflow_anything(
    tmp_path: Path, uri: str, on_path: None
) -> None:
    run_dir, upload = finished(tmp_path, tracking(uri, "my_sinks.Raising", "my_sinks.Plain"))
    assert (upload.complete, upload.uploaded) == (True, 10)
    assert sorted(lines(run_dir, "plain")) == ALL
    assert sink_problem(run_dir) == "my_sinks.Raising: ValueError: password=*** is wrong"
    assert history(uri, run_of(uri, run_dir).info.run_id) == expected(run_dir)


@pytest.mark.campaign
def test_a_sink_that_ends_its_process_costs_mlflow_nothing(tmp_path: Path, uri: str, on_path: None) -> None:
    run_dir, upload = finished(tmp_path, tracking(uri, "my_sinks.Dying"))
    assert upload.complete
    assert sink_problem(run_dir) == "sinks: their process has died (exit code 3)"


def test_sinks_need_no_server_and_a_follower_that_is_killed_leaves_no_step_twice(tmp_path: Path, on_path: None) -> None:
    config = replace(tracking(None, "my_sinks.Plain"), upload_every_s=0.1)
    run_dir = new_run(tmp_path, None, params={"job.password": "hunter2"})
    uploader = RunUploader.start(run_dir, config)
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 4))
    wait_for(lambda: (run_dir.sinks / "plain").is_dir() and len(lines(run_dir, "plain")) == 7, "the first points")
    feeder = wait_for(lambda: follower_of(run_dir))
    feeder.kill()
    wait_for(lambda: uploader.problem() is not None, "the death is noticed")
    assert sink_problem(run_dir) == "sinks: their process has died (exit code -9)"
    log(journal, range(4, 6))
    save_samples(journal, run_dir, 3)
    end(journal, run_dir, final_loss=0.2)
    journal.close()
    upload = uploader.finish(200)
    assert (upload.complete, upload.missing) == (True, 0)
    assert sorted(lines(run_dir, "plain")) == ALL
    assert sink_problem(run_dir) is None


@pytest.mark.campaign
def test_a_follower_whose_upload_dies_is_replaced_with_its_sinks(tmp_path: Path, uri: str, on_path: None) -> None:
    run_dir = new_run(tmp_path, uri, params={"job.password": "hunter2"})
    uploader = RunUploader.start(run_dir, replace(tracking(uri, "my_sinks.Plain"), upload_every_s=60))
    journal = Journal(run_dir)
    start(journal)
    follower = wait_for(lambda: follower_of(run_dir))
    supervisor = follower.parent()
    assert supervisor is not None
    children = wait_for(lambda: len(found := supervisor.children()) == 2 and found)
    max(children, key=lambda child: child.pid).kill()  # the one that uploads begins last
    wait_for(lambda: uploader.problem() == "the upload process died; another one continues")
    assert not psutil.pid_exists(min(child.pid for child in children))
    log(journal, range(1, 6))
    save_samples(journal, run_dir, 3)
    end(journal, run_dir, final_loss=0.2)
    journal.close()
    assert uploader.finish(200).complete
    assert sorted(lines(run_dir, "plain")) == ALL


def test_steps_that_are_repeated_are_there_once(tmp_path: Path, on_path: None) -> None:
    run_dir = new_run(tmp_path, None, params={"job.password": "x"})
    sinks = Sinks(run_dir, ["my_sinks.Plain"])
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 5))
    sinks.push(None)
    journal.emit(Continued(step=2))
    log(journal, range(3, 6))
    sinks.push(None)
    journal.close()
    sinks.push(Ending(status="KILLED", time=0.0, summary={"final_loss": 1}))
    told = [line for line in lines(run_dir, "plain") if line.startswith("train/loss")]
    assert told == [f"train/loss {n} {1 / n}" for n in range(1, 6)]


def test_tensorboard_has_scalars_parameters_texts_and_images(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, _ = finished(tmp_path, tracking(None, tensorboard=True))
    assert sink_problem(run_dir) is None
    folder = run_dir.sinks / "tensorboard"
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [(e.step, pytest.approx(e.value)) for e in found.Scalars("train/loss")] == expected(run_dir)
    assert found.Scalars("summary/final_loss")[0].value == pytest.approx(0.2)
    assert [event.step for event in found.Images("digits")] == [3]
    (text,) = found.Tensors("says/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (3, b"step 3")
    stored = b"".join(file.read_bytes() for file in folder.iterdir())
    assert b"_hparams_/session_start_info" in stored
    assert b"job.lr" in stored
    assert b"hunter2" not in stored
    again = Sinks(run_dir, [TENSORBOARD])  # as after a restart
    again.push(final_ending(run_dir))
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_the_sinks_of_the_documentation_write_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_example = [example for page in PAGES for example in examples(page)]
    (source,) = [example.source for example in every_example if "class CsvSink" in example.source]
    (tmp_path / "csv_sink.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    run_dir, _ = finished(tmp_path, tracking(None, "csv_sink.CsvSink"))
    assert sink_problem(run_dir) is None
    with (run_dir.sinks / "csvsink" / "points.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["name", "step", "time", "value"]
    assert [(int(row[1]), float(row[3])) for row in rows if row[0] == "train/loss"] == expected(run_dir)


@pytest.mark.campaign
def test_weights_and_biases_get_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: one run with the id of ours, at our steps, also of steps that a recovery repeats."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_TAGS", "mine")
    params = {"job.lr": 0.1, "job.password": "hunter2"}
    run_dir = new_run(tmp_path, None, params=params, uid=UID, strategy="ddp", job="digits")
    sinks = Sinks(run_dir, ["wandb"])
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 5))
    save_samples(journal, run_dir, 3)
    sinks.push(None)
    journal.emit(Continued(step=2))
    log(journal, range(3, 6))
    journal.close()
    sinks.push(Ending(status="KILLED", time=0.0, summary={"final_loss": 0.2}))
    assert sink_problem(run_dir) is None
    (written,) = (run_dir.sinks / "wandb").glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(written))
    (run,) = [record.run for record in records if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.run_id, run.project, run.display_name) == (UID, "tests", "digits-ddp")
    assert set(run.tags) == {"strategy:ddp", "job:digits", "mine"}
    assert config["job"] == {"lr": 0.1, "password": "***"}
    rows = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            for record in records if record.HasField("history")]  # fmt: skip
    assert [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (n, 1 / n) for n in range(1, 6)
    ]
    assert [row["_step"] for row in rows if "samples/digits" in row] == []  # of a step that is repeated
    summary = {i.key: i.value_json for r in records if r.HasField("summary") for i in r.summary.update}
    assert (summary["summary/final_loss"], summary["status"]) == ("0.2", '"KILLED"')
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [255]
    assert b"hunter2" not in written.read_bytes()


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run of W&B."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = file.read_bytes(), 7, b""  # blocks of LevelDB's log, after a head
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the last part of a record
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


class StandInForWandb:
    """The server has the steps before ``starting_step``."""

    def __init__(self, starting_step: int) -> None:
        self.starting_step = starting_step
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((step, values))


@pytest.mark.parametrize(("has_before", "first"), [(0, 1), (3, 3)])
def test_weights_and_biases_that_have_steps_get_only_later_ones(
    has_before: int, first: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    online = StandInForWandb(has_before)
    given: dict[str, Any] = {}
    module = SimpleNamespace(init=lambda **options: given.update(options) or online, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = {
        "uid": UID,
        "name": "a",
        "settings": "lr=0.1",
        "strategy": "ddp",
        "job": "b",
        "params": {},
        "tracking": {"experiment": "c"},
    }
    sink = load_sink("wandb")(run, tmp_path)
    assert given["name"] == "a lr=0.1"
    points = [p for n in range(1, 6) for p in (Point("train/loss", n, 0.0, n), Point("system/cpu", n, 0.0, 10 + n))]
    sink.log_points([*points, Point("val/late", 1.0, 0.0, 4)])
    steps = [n for n in range(1, 6) if n >= first]
    assert [step for step, values in online.rows if "train/loss" in values] == steps
    assert [step for step, values in online.rows if "system/cpu" in values] == steps
    assert online.rows[-1] == (5, {"val/late": 1.0})


def test_samples_come_after_the_points_of_their_step(tmp_path: Path, on_path: None) -> None:
    run_dir = new_run(tmp_path, None, params={"job.password": "x"})
    journal = Journal(run_dir)
    start(journal)
    log(journal, range(1, 6))
    save_samples(journal, run_dir, 2, 5)
    journal.close()
    Sinks(run_dir, ["my_sinks.Plain"]).push(None)
    told = [line.split()[:2] for line in lines(run_dir, "plain")[1:]]
    expected_order = [[name, str(n)] for n in range(1, 6) for name in ("train/loss", "perf/step_ms", "digits", "says")
                      if n in (2, 5) or "/" in name]  # fmt: skip
    assert told == expected_order


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("mlflow", "no sink has this name; there are tensorboard and wandb, or give the import path of a class"),
        ("Wandb", "no sink has this name"),
    ],
)
def test_a_word_that_no_sink_has_is_answered_with_those_that_there_are(word: str, error: str) -> None:
    with pytest.raises(ValueError, match=rf"^tracking.sinks=\[{word}\]: {error}"):
        tracking(None, word)


def test_a_word_and_its_key_are_one_sink() -> None:
    config = tracking(None, "tensorboard", "wandb", tensorboard=True)
    assert config.all_sinks == (TENSORBOARD, "wandb")


def test_what_was_written_offline_has_a_command_that_uploads_it(tmp_path: Path) -> None:
    assert sync_command(tmp_path) is None
    (offline := tmp_path / "wandb" / "wandb" / "offline-run-20260501_1230-a").mkdir(parents=True)
    assert sync_command(tmp_path) == f"wandb sync {offline}"


def test_a_login_is_asked_for_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert why_unusable() == "W&B has no login; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password abc\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert why_unusable() is None
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert why_unusable() is not None
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert why_unusable() is None


def test_parameters_of_weights_and_biases_are_nested() -> None:
    assert nested({"seed": 0, "job.lr": 1, "job.of.a": 2, "job.of": 3, "a.b.c": 4, "a.b": 5, "d": 1, "d.e": 2}) == {
        "seed": 0, "job": {"lr": 1, "of": {"a": 2}}, "job.of": 3, "a": {"b": {"c": 4}}, "a.b": 5, "d": 1, "d.e": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module.Sink", "tracking.sinks=[no_such_module.Sink]: cannot be imported (ModuleNotFoundError: No"),
        ("my_sinks.Missing", "tracking.sinks=[my_sinks.Missing]: cannot be imported (AttributeError: module"),
        (
            "Sink",
            "tracking.sinks=[Sink]: cannot be imported (ValueError: Empty module name); give the import path of a",
        ),
        ("my_sinks.Partial", "tracking.sinks=[my_sinks.Partial]: lacks log_sample, close; add the methods of docs/"),
    ],
)
def test_a_sink_that_cannot_be_used_is_named(path: str, words: str, on_path: None) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        load_sink(path)
