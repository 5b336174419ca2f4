"""Runs of several commands on one cluster: they take turns, make room for more urgent ones, and lose nothing by it."""

import contextlib
import functools
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from helpers.machines.queue_entries import entry
from helpers.machines.unfit import other_torch
from helpers.records.recorder import Recorder
from helpers.records.runs import events, last_step, losses, wait_for
from orchestrator import stop
from orchestrator.compat.ray.side_effects import without_services
from orchestrator.config.redact import Redactor
from orchestrator.driver.process.calls import GangError
from orchestrator.driver.process.run_context import EventStream
from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.process.waiting import TurnLostError
from orchestrator.features.queue import turns
from orchestrator.features.queue.control import QueueControl, QueueError
from orchestrator.features.queue.entries import QueueEntry
from orchestrator.features.queue.run_queue import find_queue
from orchestrator.features.queue.turns import QueuePlace
from orchestrator.protocol.events import WaitingInQueue, Warned
from orchestrator.queue import main
from orchestrator.records.run_dir import RunDir, state_of

WORDS = (
    "strategy=ddp",
    "strategy.num_workers=2",
    "tracking=none",
    "train.log_every=1",
    "train.eval_every=0",
    "checkpoint.every=0",
    "job._target_=helpers.jobs.leisurely_job.Leisurely",
)
TIMEOUT_S = 150


class Command:
    """A command on the cluster that runs in a folder of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path):
        self.process = process
        self._folder = folder

    @property
    def run_dir(self) -> Path:
        (record,) = self._folder.glob("outputs/*/*/run.json")
        return record.parent

    @property
    def state(self) -> str:
        return state_of(RunDir(self.run_dir))

    def events(self, kind: str) -> Sequence[dict[str, Any]]:
        with contextlib.suppress(ValueError, FileNotFoundError):  # it has not begun
            return events(self.run_dir, kind)
        return ()

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait while the command runs."""

        def met() -> Any:
            assert self.process.poll() is None, self.process.communicate()[0]
            return condition()

        wait_for(met, what, timeout_s=TIMEOUT_S)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: last_step(self._folder) >= step, f"step {step}")

    def output(self, *, code: int) -> str:
        """What the command has printed when it has ended with ``code``."""
        output, _ = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == code, output
        return output


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node with two CPUs, which this process has joined. It asks for no token, although this user may have one."""
    with pytest.MonkeyPatch.context() as environment, without_services():
        environment.setenv("RAY_AUTH_MODE", "disabled")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        ray.init(address=made.address)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[QueueControl]:
    with QueueControl(cluster.address) as control:
        yield control


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path, launch: Callable[..., Any]) -> Callable[..., Command]:
    """``start("first", "train.steps=30")`` starts a run of this name."""

    def begin(name: str, *words: str) -> Command:
        folder = tmp_path / name
        given = {word.partition("=")[0] for word in words}
        common = (word for word in WORDS if word.partition("=")[0] not in given)
        own = (f"cluster.address={cluster.address}", f"name={name}", f"output_dir={folder}/outputs")
        return Command(launch(*common, *own, *words, RAY_AUTH_MODE="disabled"), folder)

    return begin


def entries(queue: QueueControl) -> dict[str, QueueEntry]:
    """The runs in the queue by name, in its order; none while it is started again."""
    with contextlib.suppress(QueueError):
        return {e.name: e for e in queue.entries()}
    return {}


def states(queue: QueueControl) -> dict[str, str]:
    return {name: e.state for name, e in entries(queue).items()}


def kill_queue(cluster: Cluster) -> None:
    (raylet,) = cluster.head_node.all_processes["raylet"]
    (actor,) = (
        child
        for child in psutil.Process(raylet.process.pid).children(recursive=True)
        if " ".join(child.cmdline()).startswith("ray::RunQueueActor")
    )
    actor.kill()


@pytest.fixture
def place() -> Callable[..., QueuePlace]:
    """``place(entry("run"), timeout_s=1)`` is the place of a run of this process, whose one worker is on this node."""
    here = {ray.get_runtime_context().get_node_id(): 1}

    def make(run: QueueEntry, *, timeout_s: float | None = None, sink: Recorder | None = None) -> QueuePlace:
        events = EventStream([sink or Recorder()], Redactor())
        made = QueuePlace(
            run,
            events,
            StopSignals(),
            timeout_s=timeout_s,
            unfit_timeout_s=None,
            reserved=lambda: here if made.state == "running" else {},
        )
        return made

    return make


def occupied(num_cpus: float) -> Any:
    """An actor that another user of the cluster has there. Its class is any that a worker of Ray can import."""
    actor = ray.remote(num_cpus=num_cpus)(threading.Event).remote()
    ray.get(actor.is_set.remote(), timeout=TIMEOUT_S)
    return actor


def test_a_run_that_reserves_gives_way_to_a_more_urgent_one(cluster: Cluster, place: Callable[..., QueuePlace]) -> None:
    waits: Any = Recorder()
    with place(entry("first", workers=2), sink=waits) as first:
        first.wait_for_turn(lambda: None)
        with place(entry("urgent", priority=1)) as urgent:
            wait_for(lambda: lost_turn(first), "the loss of the turn")
            again = threading.Thread(target=first.wait_for_turn, args=(lambda: None,))
            again.start()
            urgent.wait_for_turn(lambda: None)
            urgent.check_turn()
            urgent.has_workers()
            wait_for(
                lambda: any(isinstance(e, WaitingInQueue) and e.running == ("urgent",) for e in waits.seen), "the wait"
            )
            assert urgent.others_wait
            assert again.is_alive(), "two workers do not fit beside the other run"
        again.join(TIMEOUT_S)
        assert not again.is_alive()
        first.check_turn()


def test_a_run_whose_directory_is_not_here_is_listed_and_stopped_through_the_queue(
    cluster: Cluster, queue: QueueControl, capsys: pytest.CaptureFixture[str]
) -> None:
    signals = StopSignals()
    words = ["far-away", "--address", cluster.address]
    with ThreadPoolExecutor(1) as pool:
        events = EventStream([], Redactor())
        with QueuePlace(entry("far-away"), events, signals, timeout_s=None, unfit_timeout_s=None):
            wait_for(lambda: queue.has("far-away"), "the run in the queue")
            assert main(["--address", cluster.address]) == 0
            assert "far-away" in capsys.readouterr().out
            stopped = pool.submit(stop.main, words)
            wait_for(lambda: signals.received, "the signal")
            assert not stopped.done()
        assert stopped.result(TIMEOUT_S) == 0
    assert capsys.readouterr().out == "far-away: stopped through the queue of the cluster\n"
    assert stop.main(words) == 2
    assert "nor is it in the queue of the cluster" in capsys.readouterr().err


def lost_turn(run: QueuePlace) -> bool:
    try:
        run.check_turn()
    except TurnLostError:
        return True
    return False


def test_a_wait_ends_at_its_timeout_or_without_a_queue_that_answers(
    cluster: Cluster, place: Callable[..., QueuePlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Recorder()
    namesake = place(entry("first", uid="second", at=2), timeout_s=1, sink=seen)
    with place(entry("first", at=1, workers=2)) as first:  # which leaves no CPU
        first.wait_for_turn(lambda: None)
        with namesake as second:
            wait_for(lambda: second._answered is not None, "its first answer")
            with pytest.raises(
                GangError, match=r"not the first in the queue within \d+ s \(cluster\.queue_timeout_s\)"
            ):
                second.wait_for_turn(lambda: None)
    (warned,) = (event for event in seen.seen if isinstance(event, Warned))
    assert warned.message.startswith("the queue has another run named first (id first): name=... tells them apart, and")
    ray.kill(find_queue())
    other_version = ray.remote(num_cpus=0)(Recorder).options(name="queue", namespace="orchestrator")
    stranger = wait_for(lambda: taken_by(other_version), "the name of the queue")
    monkeypatch.setattr(turns, "UNREACHABLE_S", 1.0)
    warnings = Recorder()
    with place(entry("third"), sink=warnings) as third:
        wait_for(lambda: third._problem != "no answer", "the first poll")
        third.wait_for_turn(lambda: None)
    (warned,) = warnings.seen
    assert isinstance(warned, Warned)
    assert "the queue of the cluster cannot be reached (AttributeError: " in warned.message
    assert "cluster.queue=false" in warned.message
    ray.kill(stranger)


def taken_by(actor: Any) -> Any:
    """An actor under its name; None while another one has the name."""
    with contextlib.suppress(ValueError):
        return actor.remote()
    return None


def test_a_run_makes_room_for_a_more_urgent_one_and_continues_where_it_was(
    cluster: Cluster,
    queue: QueueControl,
    place: Callable[..., QueuePlace],
    start: Callable[..., Command],
    tmp_path: Path,
) -> None:
    one = ("strategy.num_workers=1", "strategy=single")
    first = start("first", *one, "train.steps=60", "job.pause_ms=200", f"job.until={tmp_path / 'until'}")
    first.wait_for_step(5)
    with place(entry("urgent", priority=1, workers=2)) as urgent:
        first.wait_for(lambda: states(queue).get("first") in ("yielding", "waiting"), "the pause")
        (tmp_path / "until").touch()
        urgent.wait_for_turn(lambda: None)
        first.wait_for(lambda: states(queue) == {"urgent": "reserving", "first": "waiting"}, "the release of its CPUs")
    first.output(code=0)
    (yielded,), (recovered,) = first.events("yielded"), first.events("recovered")
    assert (yielded["to"], recovered["planned"], recovered["steps_lost"]) == ("urgent", "yielded", 0)
    assert yielded["step"] == recovered["step"] >= 5
    assert sorted(losses(first.run_dir)) == list(range(1, 61))
    summary = json.loads((first.run_dir / "run.json").read_text())["summary"]
    assert (summary["restarts"], summary["yields"]) == (0, 1)


@pytest.mark.campaign
def test_runs_take_turns_and_one_that_makes_room_continues_where_it_was(
    cluster: Cluster,
    queue: QueueControl,
    start: Callable[..., Command],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The queue is killed, and so is a driver that waits, and the cluster shrinks, while all CPUs are taken."""
    taken = occupied(num_cpus=2)
    node = cluster.add_node(num_cpus=2)
    large = start("large", "train.steps=120", "cluster.cpus_per_worker=2", "cluster.unfit_timeout_s=1")
    large.wait_for(lambda: states(queue) == {"large": "reserving"}, "the run that fits at first")
    first = start("first", "train.steps=120", "job.pause_ms=200", f"job.until={tmp_path / 'until'}")
    first.wait_for(lambda: "first" in states(queue), "the run behind it")
    cluster.remove_node(node)
    first.wait_for(lambda: states(queue) == {"first": "reserving"}, "the first run")
    capsys.readouterr()
    assert main(["--address", cluster.address]) == 0
    assert "first (reserving): need 2 x {CPU: 1}; free 0; node " in capsys.readouterr().out
    output = large.output(code=2)
    assert "in the queue, without a place; need 2 x {CPU: 2}; free 0; the cluster has room for 1 in all" in output
    assert "the cluster has been too small for" in output
    assert large.state == "failed"
    lost = start("lost", "train.steps=120")
    lost.wait_for(lambda: "lost" in states(queue), "the run that will be lost")
    urgent = start("urgent", "train.steps=20")
    time.sleep(0.1)  # the start of a process is known to 10 ms
    third = start("third", "train.steps=120")
    everybody = {"first": "reserving", "lost": "waiting", "urgent": "waiting", "third": "waiting"}
    third.wait_for(lambda: states(queue) == everybody, "the line")
    assert list(entries(queue)) == list(everybody), "in the order of submission"
    assert [run.state for run in (first, lost, urgent, third)] == ["waiting"] * 4
    third.wait_for(lambda: third.events("waiting_in_queue"), "the reason")
    why = third.events("waiting_in_queue")[-1]["why"]
    assert re.search(r"need 2 x \{CPU: 1\}; free 0; node .*: 2 of 2 CPUs held by Ray job 01000000 .* since \d", why)
    lost.process.kill()
    kill_queue(cluster)
    del everybody["lost"]
    third.wait_for(lambda: states(queue) == everybody, "the line in the new queue")
    assert list(entries(queue)) == list(everybody)
    ray.kill(taken)
    first.wait_for_step(5)
    queue.set_priority("urgent", 1)
    urgent.wait_for_step(1)
    (tmp_path / "until").touch()
    assert states(queue) == {"urgent": "running", "first": "waiting", "third": "waiting"}
    assert (urgent.state, first.state, lost.state) == ("running", "waiting", "died")
    urgent.output(code=0)
    output = first.output(code=0)
    assert "in the queue, place 2; before it: urgent" in output
    third.output(code=0)
    assert "2 of 2 CPUs held by run first-" in third.events("waiting_in_queue")[-1]["why"]
    (yielded,), (recovered,) = first.events("yielded"), first.events("recovered")
    assert (yielded["to"], recovered["planned"], recovered["steps_lost"]) == ("urgent", "yielded", 0)
    assert yielded["step"] == recovered["step"] >= 5
    ends = [run.events("run_ended")[0]["time"] for run in (urgent, first, third)]
    starts = [run.events("generation_started")[-1]["time"] for run in (urgent, first, third)]
    assert starts[0] < ends[0] < starts[1] < ends[1] < starts[2]
    assert len(losses(first.run_dir)) == 120
    assert losses(first.run_dir) == losses(third.run_dir)
    summary = json.loads((first.run_dir / "run.json").read_text())["summary"]
    assert (summary["restarts"], summary["yields"]) == (0, 1)
    assert summary["queue_s"] > 0
    wait_for(lambda: not entries(queue), "the end of all runs")


@pytest.mark.campaign
def test_a_run_overtakes_one_that_must_wait_and_makes_room_when_that_one_could_start(
    cluster: Cluster,
    queue: QueueControl,
    place: Callable[..., QueuePlace],
    start: Callable[..., Command],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second node has room for both, but one refuses it when it joins, and the other one excludes it."""
    taken, other = occupied(num_cpus=1), "127.0.0.2"
    with place(entry("holder")) as holder, place(entry("last", priority=-1, workers=4)):
        holder.wait_for_turn(lambda: None)
        holder.has_workers()
        large = start("large", "train.steps=20")
        in_line = {"holder": "running", "large": "waiting", "last": "unfit"}
        large.wait_for(lambda: states(queue) == in_line, "the run that must wait")
        node = cluster.add_node(num_cpus=2, node_ip_address=other, env_vars=other_torch(tmp_path / "packages"))
        request.addfinalizer(functools.partial(cluster.remove_node, node))
        large.wait_for(lambda: large.events("warned"), "the refusal of the node")
        in_line["last"] = "waiting"
        large.wait_for(lambda: states(queue) == in_line, "the return of the turn")
        words = ("strategy.num_workers=1", "train.steps=100000", f"cluster.exclude_nodes=[{other}]")
        small = start("small", *words)
        small.wait_for_step(5)
        assert states(queue) == {**in_line, "small": "running"}
        capsys.readouterr()
        assert main(["--address", cluster.address]) == 0
        assert "small (running): it has overtaken large, and makes room as soon as " in capsys.readouterr().out
        ray.kill(taken)
    large.output(code=0)
    small.wait_for(lambda: small.events("recovered"), "the return of the run that had overtaken")
    (yielded,), (recovered,) = small.events("yielded"), small.events("recovered")
    assert (yielded["to"], recovered["planned"], recovered["steps_lost"]) == ("large", "yielded", 0)
    queue.cancel("small")
    assert "the run overtakes large, for which there is no room yet" in small.output(code=143)


@pytest.mark.campaign
def test_an_elastic_run_gives_back_what_it_does_not_use_if_another_run_waits(
    cluster: Cluster, queue: QueueControl, place: Callable[..., QueuePlace], start: Callable[..., Command]
) -> None:
    """One more worker is ready, but a second pipeline needs two."""
    taken = [occupied(num_cpus=0.5) for _ in range(2)]
    words = ("strategy.num_workers=[2,4]", "cluster.cpus_per_worker=0.5", "train.steps=100000")
    elastic = start("elastic", "strategy=ddp_pipeline", *words)
    elastic.wait_for_step(1)
    ray.kill(taken[0])
    elastic.wait_for(lambda: reserved(queue) == {"elastic": 3}, "the worker that waits for another one")
    with place(entry("other", cpus_per_worker=0.5), timeout_s=TIMEOUT_S) as other:
        other.wait_for_turn(lambda: None)
        worker = occupied(num_cpus=0.5)
        other.has_workers()
        elastic.wait_for(lambda: reserved(queue) == {"elastic": 2, "other": 1}, "the report of what each has")
        ray.kill(worker)
    ray.kill(taken[1])
    elastic.wait_for(lambda: elastic.events("recovered"), "the growth")
    queue.cancel("elastic")
    elastic.output(code=143)


def reserved(queue: QueueControl) -> dict[str, int]:
    return {name: sum(e.workers_by_node.values()) for name, e in entries(queue).items()}


@pytest.mark.campaign
def test_a_run_ends_at_once_while_it_waits_and_one_that_was_killed_there_continues(
    cluster: Cluster, queue: QueueControl, start: Callable[..., Command], capsys: pytest.CaptureFixture[str]
) -> None:
    low = start("low", "train.steps=100000")
    low.wait_for_step(5)
    high = start("high", "train.steps=100000", "cluster.priority=1")
    waiting = start("waiting", "train.steps=100000")
    high.wait_for_step(1)
    waiting.wait_for(lambda: states(queue).get("waiting") == "waiting", "the third run")
    (yielded,) = low.events("yielded")
    low.process.kill()
    waiting.process.send_signal(signal.SIGINT)
    assert "stopped by SIGINT before training began" in waiting.output(code=130)
    assert main(["--address", cluster.address]) == 0
    assert " running         1  " in capsys.readouterr().out
    assert main(["--address", cluster.address, "cancel", "nobody"]) == 2
    assert capsys.readouterr().err.startswith("queue: nobody: no such run in the queue; it has: high")
    assert main(["--address", cluster.address, "cancel", "high"]) == 0
    output = high.output(code=143)
    assert "stopped by `orchestrator queue cancel` of" in output
    steps = yielded["step"] + 5
    again = start("low", f"train.steps={steps}", "resume=auto")
    again.output(code=0)
    assert again.run_dir == low.run_dir
    assert sorted(losses(low.run_dir)) == list(range(1, steps + 1))
