"""Runs on a store, from two hosts with a staging directory each."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.records.recorder import Recorder
from helpers.servers.object_store import OUTPUT, S3Server, s3  # noqa: F401 - s3 is a fixture
from jobs.digits import Digits
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.ending import RunEnding
from orchestrator.driver.preflight.record import open_run
from orchestrator.driver.preflight.resume import find_resume
from orchestrator.driver.preflight.run_config import absolute_paths, environment_errors
from orchestrator.driver.process.origin import HERE
from orchestrator.driver.process.run_context import EventStream, RunResult
from orchestrator.driver.process.uploads import tracking
from orchestrator.driver.reporting import RecordUpload
from orchestrator.planning.plan import Node, make_plan
from orchestrator.protocol.events import Warned
from orchestrator.records import lease as leases
from orchestrator.records.journal import Journal
from orchestrator.records.lease import Lease, SupersededError
from orchestrator.records.lock import this_process
from orchestrator.records.output_dir import OutputDir, fetch, find_run, folder_of_node, prepare_staging
from orchestrator.records.run_dir import LEASE_S, RunDir
from orchestrator.state.checkpoint import save
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.train_state import capture
from orchestrator.storage.remote import Remote
from orchestrator.strategies import registry

JOB = Digits(hidden=4)
NODES = (Node(node_id="n", name="n", cpus=2, gpus=0),)
ELSEWHERE = {**this_process(), "boot_id": "of another host", "host": "elsewhere"}


def config_of(folder: Path, host: str, *words: str, url: str = "") -> Config:
    errors: list[str] = []
    words = (
        f"output_dir='{url or f'file://{folder}/store'}'",
        f"storage.staging_dir={folder}/{host}",
        "tracking=none",
        *words,
    )
    config, _ = compose(words, errors, registry.config_class)
    assert config is not None, errors
    return absolute_paths(config)


def start(config: Config, together: threading.Barrier | None = None) -> RunDir:
    """Start or continue a run as a launch does it; ``together`` with others that have found the same run."""
    seen: set[str] = set()
    resume = find_resume(config, JOB, warnings=[], redactor=Redactor(), seen=seen)
    if together is not None:
        together.wait(30)
    plan = make_plan(config, registry.load(config.strategy.name), NODES, oversubscribe_cpus=True)
    run_dir, _ = open_run(config, JOB, plan, resume, seen=seen, command="", sweep=None, redactor=Redactor())
    return run_dir


def add_checkpoint(run_dir: RunDir, step: int) -> None:
    model = JOB.model()
    state = capture(model, JOB.optimizer(model.parameters()), None, step=step, samples_consumed=step)
    path = save(run_dir.checkpoints, state, run_uid="any")
    CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints).upload(path.name, fence=None)


def stored(run_dir: RunDir, folder: Path) -> Path:
    return folder / "store" / run_dir.path.relative_to(run_dir.path.parents[1])


def set_driver(run: Path, driver: dict[str, Any], **values: Any) -> None:
    """Rewrite the record on the store as if ``driver`` had started the run."""
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "driver": driver, **values}))


def let_expire(run: Path) -> None:
    long_ago = time.time() - LEASE_S - 5
    for name in ("run.json", "lease"):
        if (run / name).exists():
            os.utime(run / name, (long_ago, long_ago))


def test_a_run_is_on_the_store_before_it_trains(tmp_path: Path) -> None:
    config = config_of(tmp_path, "here")
    assert environment_errors(config) == []
    run_dir = start(config)
    run = stored(run_dir, tmp_path)
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["location"]) == ("waiting", run_dir.url)
    assert (run / "config.yaml").is_file()
    assert run_dir.path.is_relative_to(tmp_path / "here")
    assert run_dir.location_of(run_dir.log_file(0)) == f"{run_dir.url}/logs/rank-0.log"


def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a directory")
    (error,) = environment_errors(config_of(tmp_path, "here"))
    assert error.startswith(f"output_dir=file://{tmp_path}/store: cannot write")


@pytest.mark.parametrize("name", ["auto", "url", "name"])
def test_another_host_continues_a_run_whose_lease_has_expired(name: str, tmp_path: Path) -> None:
    first = start(config_of(tmp_path, "here"))
    add_checkpoint(first, 3)
    run = stored(first, tmp_path)
    set_driver(run, ELSEWHERE)
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("of the first")
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": 2.0}\n')
    resume = {"auto": "auto", "url": str(first.url), "name": first.path.name}[name]
    config = config_of(tmp_path, "there", f"resume='{resume}'")
    with pytest.raises(ConfigError, match=r"still running.*on elsewhere"):
        start(config)
    let_expire(run)
    second = start(config)
    assert (second.url, second.path.is_relative_to(tmp_path / "there")) == (first.url, True)
    assert second.log_file(0).read_text() == "of the first"
    assert second.metrics_file.read_text() == (run / "metrics.jsonl").read_text()
    assert [p.name for p in second.checkpoints.iterdir()] == ["step-00000003"]
    assert json.loads((run / "run.json").read_text())["driver"] == this_process()


def test_a_fresh_lease_keeps_a_run(tmp_path: Path) -> None:
    first = start(config_of(tmp_path, "here"))
    add_checkpoint(first, 3)
    run = stored(first, tmp_path)
    set_driver(run, ELSEWHERE)
    let_expire(run)
    (run / "lease").touch()
    with pytest.raises(ConfigError, match="still running"):
        start(config_of(tmp_path, "there", "resume=auto"))


def test_a_driver_that_was_replaced_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_REMOTE_EVERY_S", 0.1)
    run_dir = start(config_of(tmp_path, "here"))
    run = stored(run_dir, tmp_path)
    with Lease(run_dir) as lease:
        lease.admit("token 1")
        assert json.loads((run / "fence").read_text()) == {"generation": "token 1"}
        (run / "fence").unlink()
        lease.check()
        deadline = time.monotonic() + 10
        while not (run / "fence").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        set_driver(run, ELSEWHERE)
        assert not lease.is_mine()
        with pytest.raises(SupersededError, match="on elsewhere"):
            lease.check()


@pytest.mark.slow
def test_of_two_hosts_that_continue_a_run_at_once_one_gets_it(tmp_path: Path) -> None:
    first = start(config_of(tmp_path, "here"))
    add_checkpoint(first, 3)
    run = stored(first, tmp_path)
    set_driver(run, {**this_process(), "start_ticks": 0}, state="failed")
    refused: list[str] = []
    got: list[RunDir] = []

    def work(config: Config) -> None:
        try:
            got.append(start(config, together))
        except ConfigError as e:
            refused.append(str(e))

    together = threading.Barrier(2)
    configs = [config_of(tmp_path, host, "resume=auto") for host in ("one", "other")]
    threads = [threading.Thread(target=work, args=(config,)) for config in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(got), len(refused)) == (1, 1)
    assert "is still running" in refused[0] or "another process has continued" in refused[0]
    assert len(list((tmp_path / "store").glob("*/*"))) == 1


def test_the_files_of_the_host_that_drove_a_run_last_are_kept(tmp_path: Path) -> None:
    """They may be newer than those on the store, for example if that was away when the driver died."""
    run_dir = start(config_of(tmp_path, "here"))
    add_checkpoint(run_dir, 3)
    run_dir.metrics_file.write_text("not uploaded")
    run_dir.update_record(state="killed")
    continued = start(config_of(tmp_path, "here", "resume=auto"))
    assert continued.metrics_file.read_text() == "not uploaded"


def test_records_that_cannot_be_uploaded_are_named_at_the_end(tmp_path: Path) -> None:
    config = config_of(tmp_path, "here", "storage.flush_timeout_s=0.3")
    run_dir = start(config)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").write_text("not a directory")
    console, journal = Recorder(), Journal(run_dir)
    ending = RunEnding(
        plan=make_plan(config, registry.load(config.strategy.name), NODES, oversubscribe_cpus=True),
        run_dir=run_dir,
        tracking=config.tracking,
        uploader=tracking().start(run_dir, config.tracking),
        records=RecordUpload(run_dir, Lease(run_dir), config.storage, Redactor()),
        journal=journal,
        events=EventStream([console], Redactor(), journal=journal),
        redactor=Redactor(),
        resume_command="",
        in_sweep=False,
        owns_process=True,
        origin=HERE,
    )
    result = ending.finish(RunResult(status="FINISHED", exit_code=0, run_dir=run_dir.path, url=run_dir.url))
    assert (result.status, result.exit_code) == ("FINISHED", 3)
    assert result.reason.startswith(
        f"not uploaded to {run_dir.url}: config.yaml, events.jsonl, metrics.jsonl, run.json ("
    )
    assert result.reason.endswith(f"the files are in {run_dir.path}")
    assert [e.message for e in console.seen if isinstance(e, Warned)] == [result.reason]


def test_commands_read_a_run_by_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    run_dir = start(config_of(tmp_path, "here"))
    run = stored(run_dir, tmp_path)
    for text in ("{}\n", "{}\n{}\n"):
        (run / "metrics.jsonl").write_text(text)
        found = find_run(str(run_dir.url))
        fetch(found)
        assert found.metrics_file.read_text() == text
    assert find_run(f"file://{tmp_path}/store/2020-01-01/nothing") is None


def write_as_worker(folder: Path, host: str, run_dir: RunDir) -> RunDir:
    """Write what a worker on ``host`` does, if the driver of the run is elsewhere; returns the directory there."""
    there = output_of(folder, host).staged("/".join(run_dir.path.parts[-2:]))
    prepare_staging(there)
    for file in ("logs/rank-1.log", ".spools/node-1", "samples/step-000001-text.txt"):
        (there.path / file).parent.mkdir(exist_ok=True)
        (there.path / file).write_text("of the worker")
    folder_of_node(there)
    (there.checkpoints / "step-00000001").mkdir()
    (there.checkpoints / "step-00000001" / "model.safetensors").write_text("of the worker")
    return there


def output_of(folder: Path, host: str) -> OutputDir:
    return OutputDir.of(f"file://{folder}/store", staging_dir=str(folder / host))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_reader_on_the_node_of_a_worker_changes_nothing_of_the_run(tmp_path: Path) -> None:
    run_dir = start(config_of(tmp_path, "here"))
    (stored(run_dir, tmp_path) / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n')
    there = write_as_worker(tmp_path, "there", run_dir)
    before = contents(there.path)
    for _ in range(2):
        (read,) = output_of(tmp_path, "there").runs()
        fetch(read)
        assert read.read_record()["state"] == "waiting"
        assert read.metrics_file.exists()
        assert contents(there.path) == before
        set_driver(stored(run_dir, tmp_path), {**ELSEWHERE, "pid": 1})
    with pytest.raises(ConfigError, match="still running"):
        start(config_of(tmp_path, "there", "resume=auto"))
    assert contents(there.path) == before


def test_a_driver_on_the_node_of_a_worker_keeps_what_that_has_written(tmp_path: Path) -> None:
    first = start(config_of(tmp_path, "here"))
    add_checkpoint(first, 3)
    run = stored(first, tmp_path)
    there = write_as_worker(tmp_path, "there", first)
    of_node = folder_of_node(there)
    (run / "logs" / of_node).mkdir(parents=True)
    (run / "logs" / of_node / "rank-1.log").write_text("of the")
    (run / "logs" / "rank-0.log").write_text("of the first")
    set_driver(run, ELSEWHERE, state="failed")
    second = start(config_of(tmp_path, "there", "resume=auto"))
    assert second.path == there.path
    assert (second.path / ".spools" / "node-1").read_text() == "of the worker"
    logs = {str(p.relative_to(second.logs)): p.read_text() for p in second.logs.rglob("*.log")}
    assert logs == {"rank-0.log": "of the first", f"{of_node}/rank-1.log": "of the worker"}
    assert (second.checkpoints / "step-00000003" / "manifest.json").is_file()


@pytest.mark.needs("tracking")
def test_an_upload_is_left_to_the_host_that_has_continued_the_run(tmp_path: Path) -> None:
    from orchestrator.features.tracking.pending_uploads import note_pending
    from orchestrator.features.tracking.uploader import uploads_to_resume

    run_dir = start(config_of(tmp_path, "here", "tracking.uri=http://127.0.0.1:1"))
    run_dir.update_record(state="failed")
    note_pending(run_dir)
    output = output_of(tmp_path, "here")
    (found,) = uploads_to_resume(output)
    assert found.path == run_dir.path
    assert not uploads_to_resume(output, resumed=[found])
    set_driver(stored(run_dir, tmp_path), ELSEWHERE)
    assert not uploads_to_resume(output)


def test_what_a_dead_driver_has_left_goes_before_others_write_there(tmp_path: Path) -> None:
    first = start(config_of(tmp_path, "here"))
    first.log_file(0).write_text("of the first")
    prepare_staging(first)
    assert first.log_file(0).exists(), "its driver lives"
    first.update_record(driver={**this_process(), "boot_id": "of a host that is not visible from here"})
    prepare_staging(first)
    assert first.log_file(0).exists(), "its driver may live"
    first.update_record(driver={**this_process(), "start_ticks": 0})
    left = first.path.with_name(f".{first.path.name}.{'0' * 32}")
    left.mkdir()  # by a process that was killed before it had deleted it
    prepare_staging(first)
    assert contents(first.path) == {}
    assert not left.exists()


@pytest.mark.slow
def test_a_search_for_a_run_to_continue_reads_the_records_of_this_name_once(
    s3: S3Server,  # noqa: F811
    tmp_path: Path,
) -> None:
    def add(name: str, numbers: range) -> None:
        for number in numbers:
            old = Remote(f"{OUTPUT}/2026-01-01/10-00-{number:02d}-{name}", timeout_s=5)
            old.write("run.json", json.dumps({"name": name, "state": "finished", "driver": ELSEWHERE}).encode())

    def requests_of_a_start() -> list[str]:
        before = len(s3.requests())
        run_dir = start(config_of(tmp_path, "here", "resume=auto", "name=wanted", url=OUTPUT))
        requests = s3.requests()[before:]
        Remote(OUTPUT, timeout_s=5).delete_directory(run_dir.path.parent.name)
        return requests

    add("wanted", range(2))
    few = requests_of_a_start()
    add("wanted", range(2, 20))
    add("other", range(20, 30))
    many = requests_of_a_start()
    read = [request.split()[1] for request in many if request.startswith("GET") and "run.json" in request]
    assert sorted(read) == [f"/training/runs/2026-01-01/10-00-{n:02d}-wanted/run.json" for n in range(20)]
    assert len(many) - len(few) <= 2 * 18, "one HEAD and one GET for each"


def test_a_url_with_a_query_can_be_typed(tmp_path: Path) -> None:
    url = "s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http"
    assert config_of(tmp_path, "here", url=url).output_dir == url
