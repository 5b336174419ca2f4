"""Parameter servers: workers that are delayed, synchronous or not; the step over that of DDP; bytes of sparse pulls.

python benchmarks/parameter_server.py
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
from rounds import Claim, argument_parser, report, table
from torch import Tensor

from jobs.digits import Digits
from jobs.sparse import SparseLogistic, wait
from orchestrator.config.compose import compose
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.plan import Node, Plan, make_plan
from orchestrator.strategies import make_strategy
from orchestrator.strategies.base import Context
from orchestrator.worker.data import train_batches

ROUNDS = 3
WORKERS = 4
STEP_MS = 20.0
DELAYED_STEPS = 150
"""Of each worker in the experiments with delays."""
BOUNDS = (0, 1, 2, 4, 8, 16)
TARGET_LOSS = 0.5
LR = 0.4
"""Of a synchronous step, in place of which there are otherwise as many smaller updates as workers."""
TIMEOUT_S = 300

SERVER = "strategy=parameter_server"
CONSISTENCIES: dict[str, tuple[str, ...]] = {
    "sync": (SERVER, "strategy.consistency=sync"),
    "stale, s=8": (SERVER, "strategy.consistency=stale", "strategy.max_staleness=8"),
    "async": (SERVER, "strategy.consistency=async"),
}

_context = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True)
class Delayed(Digits):
    """A small model whose gradients take ``STEP_MS`` more: with ``often`` five times as long in a tenth of the steps,
    with ``always`` three times as long on the first worker."""

    hidden: int = 32
    momentum: float = 0.0
    lr: float = LR / WORKERS
    often: bool = False
    always: bool = False
    chance: random.Random = field(default_factory=random.Random)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            times = 5 if self.often and self.chance.random() < 0.1 else 1
            times = 3 if self.always and dist.get_rank() == 0 else times
            wait(times * STEP_MS / 1e3)
        return super().loss(output, target)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of a rank: how long its steps took, the losses of its batches, its figures."""

    rank: int
    seconds: Sequence[float]
    losses: Sequence[float]
    figures: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    claims: list[Claim] = []
    notes = [
        _delays(claims, rounds),
        _bounds(1 if arguments.quick else ROUNDS),
        _over_ddp(claims, rounds),
        _sparse(claims),
    ]
    report("parameter_server", claims, ceiling=None, rounds={}, notes="\n\n".join(notes), keep=not arguments.quick)


def _delays(claims: list[Claim], rounds: int) -> str:
    """Passing delays, which a bound helps against, and a worker that is always slow, which it does not."""
    rows = []
    for title, job in {
        "a tenth of the steps five times as long": Delayed(often=True),
        "one worker always three times as slow": Delayed(always=True),
    }.items():
        rates: dict[str, list[float]] = {name: [] for name in CONSISTENCIES}
        idle: dict[str, list[float]] = {name: [] for name in CONSISTENCIES}
        for _ in range(rounds):
            for name, words in CONSISTENCIES.items():
                seen = observe(words, job, workers=WORKERS, shards=1, steps=DELAYED_STEPS)[:WORKERS]
                rates[name].append(WORKERS * DELAYED_STEPS / max(s.total_s for s in seen))
                idle[name].append(statistics.fmean(s.figures["parameter_server/wait_pct"] for s in seen))
        for name in CONSISTENCIES:
            rate, wait_pct = statistics.median(rates[name]), statistics.median(idle[name])
            rows.append([title, name, f"{rate:.0f}", f"{wait_pct:.0f}"])
            print("  " + ", ".join(rows[-1]), flush=True)
        gains = [a / b for a, b in zip(rates["stale, s=8"], rates["sync"], strict=True)]
        if job.often:
            claims.append(Claim(name="passing delays: rate of stale over sync", ratios=gains, at_least=1.5))
            idle_shares = [pct / 100 for pct in idle["stale, s=8"]]
            claims.append(Claim(name="passing delays: idle share with stale", ratios=idle_shares, at_most=0.10))
        else:
            claims.append(Claim(name="always slow: rate of stale over sync", ratios=gains, at_most=1.15))
    head = ["delays", "consistency", "gradients/s of 4 workers", "idle, %"]
    return table(head, rows)


def _bounds(rounds: int) -> str:
    """The time to a loss with passing delays: more steps in a second, each of them worth less."""
    rows = []
    arms = {f"stale, s={s}": (SERVER, "strategy.consistency=stale", f"strategy.max_staleness={s}") for s in BOUNDS}
    for name, words in {"sync": CONSISTENCIES["sync"], **arms, "async": CONSISTENCIES["async"]}.items():
        job = Delayed(often=True, lr=LR if name == "sync" else LR / WORKERS)
        found = []
        for _ in range(rounds):
            seen = observe(words, job, workers=WORKERS, shards=1, steps=DELAYED_STEPS)
            found.append(_time_to(TARGET_LOSS, seen[:WORKERS]))
        steps, seconds = (statistics.median(values) for values in zip(*found, strict=True))
        rows.append([name, f"{steps:.0f}", f"{seconds:.2f}"])
        print("  " + ", ".join(rows[-1]), flush=True)
    return table([f"consistency, to a loss of {TARGET_LOSS}", "steps", "seconds"], rows)


def _time_to(loss: float, seen: Sequence[Seen]) -> tuple[float, float]:
    """Steps and seconds until the mean loss of ten steps of all workers is no larger; all of them if it never is."""
    means = [statistics.fmean(at) for at in zip(*(s.losses for s in seen), strict=True)]
    smooth = [statistics.fmean(means[max(0, i - 9) : i + 1]) for i in range(len(means))]
    steps = next((i + 1 for i, value in enumerate(smooth) if i >= 9 and value <= loss), len(means))
    return steps, max(sum(s.seconds[:steps]) for s in seen)


def _over_ddp(claims: list[Claim], rounds: int) -> str:
    """The step with two workers and two shards, over that of DDP with two workers."""
    rows = []
    for size_mb, hidden in ((4, 960), (40, 3120)):
        job = Digits(hidden=hidden, depth=2)
        times: dict[str, list[float]] = {"ddp": [], "1 shard": [], "2 shards": []}
        waited: dict[str, float] = {}
        for _ in range(rounds):
            for name in times:
                shards = 0 if name == "ddp" else int(name[0])
                words = ("strategy=ddp",) if name == "ddp" else CONSISTENCIES["sync"]
                seen = observe(words, job, workers=2, shards=shards, steps=40 if size_mb < 10 else 20)
                times[name].append(statistics.median(seen[0].seconds))
                waited[name] = seen[0].figures.get("parameter_server/wait_pct", 0.0)
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            rows.append([f"{size_mb} MB", name, f"{1e3 * middle:.1f}", f"{1e3 * middle * waited[name] / 100:.1f}"])
            print("  " + ", ".join(rows[-1]), flush=True)
            if name != "ddp":
                over = [a / b for a, b in zip(seconds, times["ddp"], strict=True)]
                claims.append(
                    Claim(
                        name=f"{size_mb} MB, {name}: step over that of ddp",
                        ratios=over,
                        at_most=2.0 if size_mb < 10 else 9.99,
                    )
                )
    return table(["parameters", "strategy", "median step, ms", "of it waiting for shards, ms"], rows)


def _sparse(claims: list[Claim]) -> str:
    rows, received = [], {}
    for sparse in (True, False):
        seen = observe(CONSISTENCIES["sync"], SparseLogistic(sparse=sparse), workers=2, shards=2, steps=30)
        figures = seen[0].figures
        received[sparse] = figures["parameter_server/bytes_received_per_step"]
        rows.append(
            [
                "sparse" if sparse else "dense",
                f"{figures['parameter_server/bytes_sent_per_step']:,.0f}",
                f"{received[sparse]:,.0f}",
                f"{figures['parameter_server/pulled_pct']:.1f}",
            ]
        )
    claims.append(
        Claim(name="bytes pulled, sparse over dense", ratios=[received[True] / received[False]], at_most=0.10)
    )
    return table(["job sparse, batch of 64", "bytes sent a step", "bytes received", "parameters pulled, %"], rows)


def observe(words: Sequence[str], job: Job, *, workers: int, shards: int, steps: int) -> list[Seen]:
    """Train in processes with gloo; what each saw after five steps of warm-up, by rank.

    Raises:
        RuntimeError: one failed or took longer than ``TIMEOUT_S``.
    """
    faults: list[str] = []
    words = [*words, f"strategy.num_workers={workers}", f"train.steps={5 + steps}", "job=digits"]
    config, _ = compose([*words, f"strategy.num_shards={shards}"] if shards else words, faults)
    if config is None or faults:
        raise RuntimeError("\n".join(faults))
    size = workers + shards
    plan = make_plan(config, (Node(node_id="here", name="here", cpus=size, gpus=0),), oversubscribe_cpus=True)
    results: SimpleQueue[Seen] = _context.SimpleQueue()
    with tempfile.NamedTemporaryFile(prefix="shards-") as store:  # a store that needs no thread, before the forks
        processes = [
            _context.Process(target=_work, args=(rank, config, plan, job, store.name, results)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    for process in processes:
        process.kill()
    if failed:
        raise RuntimeError(f"{words}: ranks {failed} failed")
    return sorted((results.get() for _ in processes), key=lambda s: s.rank)


def _work(rank: int, config: Config, plan: Plan, job: Job, store: str, results: SimpleQueue[Seen]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, plan.world_size), rank=rank, world_size=plan.world_size)
    if isinstance(job, Delayed):
        job.chance.seed(rank)
    train = config.train
    context = Context(
        mesh=plan.mesh,
        global_rank=rank,
        device=torch.device("cpu"),
        seed=0,
        train=train,
        options=config.strategy,
    )
    strategy = make_strategy(config.strategy.name, context, job)
    dataset = job.dataset("train")
    strategy.setup(dataset)
    strategy.attach()
    batches = train_batches(
        dataset,
        collate=job.collate,
        seed=0,
        samples_consumed=0,
        steps=train.steps,
        global_batch_size=train.global_batch_size,
        data_parallel_size=plan.mesh.data_parallel_size,
        dp_rank=context.dp_rank,
        grad_accumulation=1,
        num_workers=0,
        pin_memory=False,
        timeout_s=TIMEOUT_S,
        read=strategy.reads_data,
    )
    seconds, losses = [], []
    for step, batch in enumerate(batches):
        if step == 5:
            with strategy.together():
                dist.barrier()
            strategy.figures()
        began = time.perf_counter()
        result = strategy.train_step(batch, want_grad_norm=False)
        seconds.append(time.perf_counter() - began)
        losses.append(float(result.loss_sum) / max(1.0, float(result.weight)))
    figures = {name: figure.value for name, figure in strategy.figures().items()}
    with strategy.together():
        results.put(Seen(rank=rank, seconds=seconds[5:], losses=losses[5:], figures=figures))
    strategy.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
