"""The workers' part of ``strategy=script`` without Ray: the script of each rank, in processes of this one."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers.conformance.cases import CLUSTER
from helpers.machines.plans import LAPTOP, config_of, plan_of
from orchestrator.config.redact import Redactor
from orchestrator.features.scripts.script_run import ScriptRun
from orchestrator.protocol.messages import Assignment, Heartbeat, Outcome, Place, WorkerEnvironment
from orchestrator.storage.remote import Remote
from orchestrator.strategies.external.job import Script
from orchestrator.worker.control.control import AbandonedError, Outbox, StepGate
from orchestrator.worker.control.rendezvous import open_store

SCRIPTS = Path(__file__).parents[1] / "scripts"


def assignment(
    run_dir: Path,
    *,
    store_port: int = 1,
    world_size: int = 2,
    rank: int = 0,
    places: tuple[Place, ...] = (),
    remote: Remote | None = None,
    words: tuple[str, ...] = (),
) -> Assignment:
    """What the driver gives to the workers of a script, on this machine."""
    words = ("strategy=script", "job.script=x.py", f"strategy.num_workers={world_size}", "tracking=none", *words)
    config = config_of(*words)
    return Assignment(
        generation=1,
        global_rank=rank,
        store_host="127.0.0.1",
        store_port=store_port,
        backend="gloo",
        run_dir=str(run_dir),
        remote=remote,
        run_uid="uid",
        environment=WorkerEnvironment(working_dir=None, import_paths=(), config=config),
        plan=plan_of(LAPTOP, *words, embedded=True),
        places=places or tuple(Place(0, None) for _ in range(world_size)),
    )


@dataclass(frozen=True)
class Rank:
    """A rank whose script runs."""

    run: ScriptRun
    gate: StepGate
    outbox: Outbox
    ends: Future[Outcome]

    def heartbeats(self, until: str, timeout_s: float = 60) -> Heartbeat:
        """Return all that the rank has reported when it has printed the line ``until``."""
        return self._heartbeats(lambda line: line == until, timeout_s)

    def lines(self, begin: str, timeout_s: float = 60) -> list[str]:
        """Return the lines that begin so, once there is one."""
        seen = self._heartbeats(lambda line: line.startswith(begin), timeout_s)
        return [line for line in seen.lines if line.startswith(begin)]

    def _heartbeats(self, is_awaited: Callable[[str], bool], timeout_s: float) -> Heartbeat:
        seen: Heartbeat | None = None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            seen = self.outbox.collect({}).after(seen)
            if any(map(is_awaited, seen.lines)):
                return seen
            time.sleep(0.02)
        raise TimeoutError(f"what is awaited is not in {seen}")


@contextmanager
def running(
    script: str, run_dir: Path, *words: str, args: str = "", world_size: int = 2, remote: Remote | None = None
) -> Iterator[list[Rank]]:
    """Run a script of ``helpers/scripts`` on some ranks; those that still run at the end of the block are ended."""
    store = open_store("127.0.0.1", timeout_s=30)
    job = Script(script=str(SCRIPTS / script), args=args)
    ranks: list[Rank] = []
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(world_size) as pool:
        for rank in range(world_size):
            gate, outbox = StepGate(timeout_s=CLUSTER.heartbeat_timeout_s), Outbox(Redactor())
            orders = assignment(
                run_dir, store_port=store.port, world_size=world_size, rank=rank, remote=remote, words=words
            )
            run = ScriptRun(orders, job, gate=gate, outbox=outbox)
            ranks.append(Rank(run, gate, outbox, pool.submit(run.run, {})))
        try:
            yield ranks
        finally:
            for rank_ in ranks:
                rank_.gate.abandon(1)
    del store


def outcomes(ranks: list[Rank], timeout_s: float = 240) -> Mapping[int, Outcome]:
    """Return how each rank has ended; a failed one ends the others, as the driver lets it."""
    ended: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(ended) < len(ranks) and time.monotonic() < deadline:
        for number, rank in enumerate(ranks):
            if number not in ended and rank.ends.done():
                try:
                    ended[number] = rank.ends.result()
                except AbandonedError:
                    ended[number] = Outcome(status="stopped", step=rank.run.step)
                if ended[number].status == "failed":
                    threading.Timer(1.0, lambda: [other.gate.abandon(1) for other in ranks]).start()
        time.sleep(0.02)
    return ended
