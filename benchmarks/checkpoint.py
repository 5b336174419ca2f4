"""The save and the load of a checkpoint of a pipeline: each stage its own part, all on rank 0, and torch's own format.

python benchmarks/checkpoint.py [--stage-mb 500]

Each arm saves and loads the same state on the same ranks, one arm after the other in each round: `parts`, in which each
rank writes its stage; `gathered`, in which rank 0 receives all stages and writes; and `dcp`, the asynchronous save of
`torch.distributed.checkpoint`. The stall is how long training would stand still on the rank where that takes longest,
and memory is what the save adds to the peak of a process.

All arms copy the state first, into new memory, and end a save when each of its files is on the disk (`fsync`). `parts`
and `gathered` also wait for the directory, and compute a SHA-256 of each chunk; `dcp` computes a CRC-32 of each tensor.
A load of `parts` or `gathered` compares the digests, that of `dcp` does not. The first round is not counted; every
other one has the arms in reverse.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import forked
from harness.disturbance import undisturbed
from harness.rounds import Claim, argument_parser, in_turn, report, table
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.state.checkpoint import load
from orchestrator.state.checkpoint_uploader import Written
from orchestrator.state.checkpoint_writer import CheckpointWriter
from orchestrator.state.part_writers import Writers
from orchestrator.strategies.base import Strategy

WRITERS = (1, 2, 4)
WIDTH, LAYER_MB = 1024, 12.6
"""A layer, and its state with the two moments of Adam."""
LIMIT_S, ROUND_LIMIT_S = 120.0, 300.0
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Layers(Job):
    """As many layers as the state needs; nothing is learned."""

    layers: int = 4

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)))

    def dataset(self, split: str) -> Dataset[Any] | None:
        return TensorDataset(torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)) if split == "train" else None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a rank measured: times in seconds, and memory in MB that the save and the load added to its peak."""

    stall_s: float
    save_s: float
    load_s: float
    save_mb: float
    load_mb: float


Arm = Callable[[Strategy, Path], tuple[Callable[[], None], Callable[[], None]]]
"""Begins a save, and returns what waits for its end and what loads it."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--stage-mb", type=float, default=500.0, help="state of a stage (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default: %(default)s)")
    parser.add_argument("--writers", type=int, nargs="+", default=WRITERS, help="(default: %(default)s)")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    found: dict[int, list[Mapping[str, Sequence[Saved]]]] = {}
    for workers in arguments.writers:
        layers = max(1, round(arguments.stage_mb / LAYER_MB)) * workers
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            of_ranks = undisturbed(
                functools.partial(
                    forked.train,
                    overrides(workers),
                    Layers(layers=layers),
                    functools.partial(measure, folder, rounds),
                    timeout_s=(rounds + 1) * ROUND_LIMIT_S,
                )
            )
        found[workers] = [{arm: [rank[i][arm] for rank in of_ranks] for arm in of_ranks[0][i]} for i in range(rounds)]
    rows = [
        [str(workers), arm, *cells(of_workers, arm)]
        for workers, of_workers in found.items()
        for arm in sorted(of_workers[0])
    ]
    many = max(arguments.writers)
    most = found[many]
    claims = [
        *(
            Claim(name=f"{what}, parts / {other}, {many} writers", ratios=ratios(most, other, slowest), at_most=goal)
            for what, other, slowest, goal in (
                ("time to save", "gathered", slowest_save, 0.7),
                ("training stands still", "gathered", slowest_stall, 0.5),
                ("time to save", "dcp", slowest_save, 1.0),
            )
        ),
        Claim(
            name=f"memory of a save, rank 0 / largest other, {many} writers",
            ratios=[r["parts"][0].save_mb / max(s.save_mb for s in r["parts"][1:]) for r in most],
            at_most=1.05,
        ),
    ]
    head = ["writers", "arm", "save, s", "stall, s", "load, s", "memory of rank 0, MB", "largest other, MB", "load, MB"]
    notes = f"A stage has {arguments.stage_mb:g} MB.\n\n{table(head, rows)}"
    report("checkpoint", claims, ceiling=None, rounds={}, notes=notes, keep=not arguments.quick)


def overrides(workers: int) -> list[str]:
    if workers == 1:
        return ["strategy=single", "train.global_batch_size=8", "cluster.device=cpu"]
    return ["strategy=pipeline", f"strategy.num_workers={workers}", "train.global_batch_size=8", "cluster.device=cpu"]


def measure(folder: str, rounds: int, strategy: Strategy, config: Config) -> list[dict[str, Saved]]:
    """Run all arms on this rank, in every round."""
    for p in strategy.trained.parameters:  # type: ignore[attr-defined]
        p.grad = torch.zeros_like(p)
    strategy.trained.optimizer.step()  # type: ignore[attr-defined]
    strategy.trained.optimizer.zero_grad()  # type: ignore[attr-defined]
    arms: dict[str, Arm] = {"parts": parts, "gathered": gathered, "dcp": by_torch}
    return [
        {name: run(arms[name], strategy, Path(folder, f"{name}-{i}")) for name in in_turn(arms, i)}
        for i in range(rounds + 1)
    ][1:]


def run(arm: Arm, strategy: Strategy, folder: Path) -> Saved:
    before_mb = begin_peak()
    dist.barrier()
    began = time.perf_counter()
    finish, load_again = arm(strategy, folder)
    stall_s = time.perf_counter() - began
    finish()
    save_s, save_mb = time.perf_counter() - began, peak_mb() - before_mb
    before_mb = begin_peak()
    dist.barrier()
    began = time.perf_counter()
    load_again()
    load_s, load_mb = time.perf_counter() - began, peak_mb() - before_mb
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return Saved(stall_s=stall_s, save_s=save_s, load_s=load_s, save_mb=save_mb, load_mb=load_mb)


def parts(strategy: Strategy, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    rank, jointly = strategy.context.global_rank, None
    if len(strategy.saved.writers) > 1:
        store = dist.distributed_c10d._get_default_store()
        writers = Writers(
            store=store,
            ranks=strategy.saved.writers,
            rank=rank,
            names=strategy.saved.names,
            stall_timeout_s=LIMIT_S,
            lost_timeout_s=LIMIT_S,
            ended=threading.Event(),
        )
        jointly = writers.joint_save(str(folder))
    state = strategy.capture(part=True, step=1, samples_consumed=8, into=None)
    writer = CheckpointWriter(folder, keep=1, run_uid="benchmark")
    assert state is not None
    assert writer.submit(state, jointly=jointly) is None

    def load_own() -> None:
        found = load(folder / "step-00000001")
        if jointly is None:
            strategy.restore(found, source=0)
        else:
            strategy.restore(found, source=None)

    return functools.partial(finish, writer, reports=rank == 0), load_own


def gathered(strategy: Strategy, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    state = strategy.capture(step=1, samples_consumed=8, into=None)
    writer = CheckpointWriter(folder, keep=1, run_uid="benchmark")
    if state is not None:
        assert writer.submit(state) is None

    def load_all() -> None:
        strategy.restore(load(folder / "step-00000001") if state is not None else None, source=0)

    return functools.partial(finish, writer, reports=state is not None), load_all


def finish(writer: CheckpointWriter, *, reports: bool) -> None:
    assert writer.close(LIMIT_S) is None
    assert [type(result) for result in writer.results()] == ([Written] if reports else [])


def by_torch(strategy: Strategy, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    own: dict[str, Any] = dict(strategy.trained.module().state_dict())  # type: ignore[attr-defined]
    names = {p: name for name, p in strategy.trained.module().named_parameters()}  # type: ignore[attr-defined]
    for p, values in strategy.trained.optimizer.state.items():  # type: ignore[attr-defined]
        own |= {f"{names[p]}/{key}": value for key, value in values.items()}
    saving = dcp.async_save(own, checkpoint_id=folder)
    return saving.result, functools.partial(dcp.load, own, checkpoint_id=folder)


def begin_peak() -> float:
    """Return freed memory to the system, forget the peak memory of this process so far; return its memory in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


def peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def slowest_save(ranks: Sequence[Saved]) -> float:
    return max(s.save_s for s in ranks)


def slowest_stall(ranks: Sequence[Saved]) -> float:
    return max(s.stall_s for s in ranks)


def ratios(
    rounds: Sequence[Mapping[str, Sequence[Saved]]], other: str, of: Callable[[Sequence[Saved]], float]
) -> list[float]:
    return [of(r["parts"]) / of(r[other]) for r in rounds]


def cells(rounds: Sequence[Mapping[str, Sequence[Saved]]], arm: str) -> list[str]:
    def middle(of: Callable[[Sequence[Saved]], float]) -> float:
        return statistics.median(of(r[arm]) for r in rounds)

    return [
        f"{middle(slowest_save):.2f}",
        f"{middle(slowest_stall):.2f}",
        f"{middle(lambda ranks: max(s.load_s for s in ranks)):.2f}",
        f"{middle(lambda ranks: ranks[0].save_mb):,.0f}",
        f"{middle(lambda ranks: max([s.save_mb for s in ranks[1:]], default=0.0)):,.0f}",
        f"{middle(lambda ranks: max(s.load_mb for s in ranks)):,.0f}",
    ]


if __name__ == "__main__":
    main()
