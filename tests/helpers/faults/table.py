"""The table of faults: what happens to which worker, when, in which layout, and what the run promises.

Neither torch nor Ray is imported here, so that tests of the documentation can read the names of the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from helpers.faults.layouts import COPIES
from orchestrator.planning.faults import Fault, parse

STEPS = 24
EVERY = 8
"""The steps from one evaluation and one checkpoint to the next."""
VARIANTS = {
    "": (),
    "late reports": ("cluster.heartbeat_s=5",),  # a worker that dies has not reported its last steps
    "short patience": ("recovery.hang_min_s=2", "recovery.hang_max_s=20"),
    "short rendezvous": ("cluster.rendezvous_timeout_s=12",),
    "own updates": (
        "job._target_=helpers.jobs.step_toys.Distillation",
        "train.global_batch_size=25",
        "train.ema_decay=0.9",
    ),
    "powersgd": ("job._target_=helpers.jobs.faulty_jobs.OneModel", "strategy.comm_hook=powersgd"),
    "no checkpoint": ("checkpoint.every=0",),
    "buffers": ("job._target_=helpers.jobs.normed_job.Normed",),
    "slow steps": (
        "train.steps=200",
        "train.eval_every=0",
        "checkpoint.every=25",
        "train.global_batch_size=48",
        "job._target_=helpers.jobs.leisurely_job.Leisurely",
        "job.momentum=0",  # which would make more of rounding, that differs with the number of workers
        "job.lr=0.1",
        "job.hidden=64",
        "cluster.cpus_per_worker=0.5",
    ),
}
"""What is special in a run, as overrides, by name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run with faults that recovers.

    Attributes:
        tier: ``fast`` or ``ci``; empty for the campaign.
        layout: its name in ``layouts.py``.
        faults: the faults that lead to each recovery.
        source: where the state comes from: ``in place`` if the survivors have all of it, their ``copies``, the last
            ``checkpoint``, or the ``start``.
        steps: the steps after which each recovery may continue: the last copy or checkpoint may not have been complete.
        weights: whether the final ones are ``equal`` to those of an undisturbed run, ``close`` to those of plain torch,
            or have ``learned``.
        variant: a key of :data:`VARIANTS`.
        workers: the smallest number, that after the recovery, and the largest; empty if it does not change.
        words: other overrides.
        injected: whether ``recovery.chaos`` causes the faults; otherwise the job does.
    """

    tier: str = ""
    layout: str
    faults: tuple[tuple[Fault, ...], ...]
    source: str = "in place"
    steps: tuple[tuple[int, ...], ...]
    weights: str = "equal"
    variant: str = ""
    workers: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    injected: bool = True

    def __str__(self) -> str:
        happens = ", then ".join(" and ".join(map(str, faults)) for faults in self.faults)
        workers = "{2} workers, then {1}, then {2}".format(*self.workers) if self.workers else ""
        source = self.source if self.source == "in place" else f"from {self.source}"
        return ", ".join(filter(None, (f"{self.layout}: {happens}", self.variant, workers, source)))

    @property
    def overrides(self) -> tuple[str, ...]:
        """Those of this row, without those of its layout and its faults."""
        copies = (COPIES,) if self.source == "copies" else ()
        bounds = (f"strategy.num_workers=[{self.workers[0]},{self.workers[-1]}]",) if self.workers else ()
        return (*copies, *bounds, *VARIANTS[self.variant], *self.words)


def grouped(faults: str) -> tuple[tuple[Fault, ...], ...]:
    """Return the faults of a text; spaces are between recoveries, commas between the faults that lead to one."""
    return tuple(tuple(map(parse, group.split(","))) for group in faults.split())


def _steps(text: str) -> tuple[int, ...]:
    """Return the steps of ``8``, of ``4/8``, or of ``1-12``."""
    first, dash, last = text.partition("-")
    return tuple(range(int(first), int(last) + 1)) if dash else tuple(map(int, text.split("/")))


def _rows(line: str) -> Iterator[Row]:
    """Yield the rows of a line: one for each of the values that a cell lists between ``or``."""
    for cells in itertools.product(*([value.strip() for value in cell.split(" or ")] for cell in line.split("|"))):
        tier, layout, faults, source, steps, weights, variant, workers = cells
        yield Row(
            tier=tier,
            layout=layout,
            faults=grouped(faults),
            source=source,
            steps=tuple(map(_steps, steps.split())),
            weights=weights,
            variant=variant,
            workers=tuple(map(int, workers.split())),
        )


ROWS = [
    row
    for line in """\
tier| layout                 | faults                       | source    | steps    | weights| variant         | workers
fast| ddp                    | kill@13:1                    | in place  | 12       | close  | late reports    |
    | ddp                    | kill@13:0                    | in place  | 12       | equal  | late reports    |
    | ddp with a spare       | kill@13:0 or kill@13:1       | in place  | 12       | equal  | late reports    |
    | ddp                    | raise@13:1 or exit@13:1      | in place  | 12       | equal  |                 |
    | ddp                    | segv@13:1                    | in place  | 12       | equal  |                 |
    | ddp                    | sleep@13:1 or gil@13:1       | in place  | 12       | equal  | short patience  |
ci  | ddp    | kill@8:0:checkpoint segv@13:1 stop@20:1| in place  | 8 12 19  | equal  |                 |
    | ddp                    | kill@8:1:eval                | in place  | 8        | equal  |                 |
    | ddp                    | kill@24:1:eval               | in place  | 24       | equal  |                 |
    | ddp                    | kill@24:0:checkpoint         | in place  | 24       | equal  |                 |
    | ddp                    | kill@24:0:end                | in place  | 24       | equal  |                 |
    | ddp                    | kill@13:1 kill@20:0 kill@22:1| in place  | 12 19 21 | equal  |                 |
    | ddp                    | kill@13:1                    | in place  | 12       | equal  | own updates     |
    | ddp                    | kill@0:1:join                | start     | 0        | equal  |                 |
    | ddp                    | stop@0:1:join                | start     | 0        | equal  |                 |
    | ddp                    | sleep@0:1:join               | start     | 0        | equal  | short rendezvous|
    | ddp                    | kill@0:1:build               | start     | 0        | equal  |                 |
    | ddp                    | kill@13:0,kill@13:1          | checkpoint| 0/8      | equal  |                 |
    | ddp                    | kill@13:1,kill@12:0:build    | checkpoint| 0/8      | equal  |                 |
    | ddp                    | kill@13:1                    | checkpoint| 0/8      | learned| powersgd        |
    | ddp_pipeline or hsdp   | raise@13:1 kill@19:2         | in place  | 12 18    | equal  |                 |
    | hsdp                   | kill@13:1,kill@13:2          | in place  | 12       | equal  |                 |
    | single                 | kill@13:0                    | checkpoint| 0/8      | close  |                 |
ci  | fsdp                   | kill@13:1                    | checkpoint| 0/8      | close  |                 |
    | pipeline               | kill@13:1                    | checkpoint| 0/8      | close  |                 |
    | fsdp_pipeline          | kill@13:1                    | checkpoint| 0/8      | close  |                 |
ci  | pipeline               | kill@11:1                    | copies    | 4/8      | close  | no checkpoint   |
    | pipeline or fsdp       | kill@11:1 kill@20:0          | copies    | 4/8 12/16| close  | no checkpoint   |
    | fsdp_pipeline          | kill@11:1 kill@20:0          | copies    | 4/8 12/16| close  | no checkpoint   |
    | ddp, divided optimizer | kill@11:1 kill@20:0          | copies    | 4/8 12/16| close  | no checkpoint   |
    | parameter_server       | kill@13:0 or kill@13:1       | in place  | 11/12    | equal  | no checkpoint   |
    | parameter_server       | kill@13:0 or kill@13:1       | in place  | 11/12    | equal  | buffers         |
    | parameter_server       | kill@8:1:eval kill@13:0 kill@19:1| in place| 7/8 11/12 17/18| equal| no checkpoint|
    | parameter_server       | kill@15:2                    | checkpoint| 0/8      | equal  | buffers         |
ci  | parameter_server       | kill@15:3                    | checkpoint| 0/8      | close  |                 |
    | parameter_server, async| kill@13:0 or kill@13:1       | in place  | 1-12     | learned| no checkpoint   |
    | parameter_server, async| kill@15:2 or kill@15:3       | checkpoint| 0/8      | learned|                 |
    | hogwild or locked_sgd  | kill@13:0 or kill@13:1       | in place  | 1-12     | learned| no checkpoint   |
ci  | ddp                    | kill@10:1                    | in place  | 9        | close  | slow steps      | 1 2 3
    | ddp_pipeline           | kill@20:3                    | in place  | 19       | close  | slow steps      | 2 2 4
    | hsdp                   | kill@20:3                    | in place  | 19       | close  | slow steps      | 4 4 6
    | pipeline or fsdp       | kill@40:1                    | checkpoint| 0/25     | close  | slow steps      | 2 2 3
    | fsdp_pipeline          | kill@40:1                    | checkpoint| 0/25     | close  | slow steps      | 4 4 6
    | ddp, divided optimizer | kill@40:1                    | checkpoint| 0/25     | close  | slow steps      | 2 2 3
""".splitlines()[1:]
    for row in _rows(line)
]
