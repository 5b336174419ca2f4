"""Parameter servers: workers that are delayed, synchronous or not; the step over that of DDP; bytes of sparse pulls.

python benchmarks/parameter_server.py
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import forked
import torch
import torch.distributed as dist
from forked import Seen
from rounds import HERE, Claim, argument_parser, report, table
from torch import Tensor

from jobs.digits import Digits
from jobs.sparse import SparseLogistic, wait
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.strategies.base import Strategy

ROUNDS = 3
WORKERS = 4
STEP_MS = 20.0
DELAYED_STEPS = 150
"""Of each worker in the experiments with delays."""
BOUNDS = (0, 1, 2, 4, 8, 16)
TARGET_LOSS = 0.5
LR = 0.4
"""Of a synchronous step, in place of which there are otherwise as many smaller updates as workers."""

SERVER = "strategy=parameter_server"
PASSING, ALWAYS = "a tenth of the steps five times as long", "one worker always three times as slow"
PICTURE = HERE / "results" / "parameter_server.png"

Measured = dict[str, dict[str, list[float]]]
"""By kind of delay and by consistency: a value for each round."""

CONSISTENCIES: dict[str, tuple[str, ...]] = {
    "sync": (SERVER, "strategy.consistency=sync"),
    "stale, s=8": (SERVER, "strategy.consistency=stale", "strategy.max_staleness=8"),
    "async": (SERVER, "strategy.consistency=async"),
}


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


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    claims: list[Claim] = []
    rates, idle = _delays(claims, rounds)
    to_target = _bounds(rounds)
    notes = [
        table(
            ["delays", "consistency", f"gradients/s of {WORKERS} workers", "idle, %"],
            [
                [
                    delays,
                    name,
                    f"{statistics.median(rates[delays][name]):.0f}",
                    f"{100 * statistics.median(shares):.0f}",
                ]
                for delays, of in idle.items()
                for name, shares in of.items()
            ],
        ),
        table(
            [f"consistency, to a loss of {TARGET_LOSS}", "steps", "seconds"],
            [[name, f"{steps:.0f}", f"{seconds:.2f}"] for name, (steps, seconds) in to_target.items()],
        ),
        _over_ddp(claims, rounds),
        _sparse(claims),
    ]
    report("parameter_server", claims, ceiling=None, rounds={}, notes="\n\n".join(notes), keep=not arguments.quick)
    if not arguments.quick:
        draw(rates, to_target, PICTURE)


def _delays(claims: list[Claim], rounds: int) -> tuple[Measured, Measured]:
    """Gradients/s and idle shares: passing delays, which a bound helps against, and a worker that is always slow, which
    it does not."""
    rates: Measured = {}
    idle: Measured = {}
    for delays, job in {PASSING: Delayed(often=True), ALWAYS: Delayed(always=True)}.items():
        rates[delays] = {name: [] for name in CONSISTENCIES}
        idle[delays] = {name: [] for name in CONSISTENCIES}
        for _ in range(rounds):
            for name, words in CONSISTENCIES.items():
                seen = observe(words, job, workers=WORKERS, shards=1, steps=DELAYED_STEPS)[:WORKERS]
                rates[delays][name].append(WORKERS * DELAYED_STEPS / max(s.total_s for s in seen))
                idle[delays][name].append(statistics.fmean(s.figures["parameter_server/wait_pct"] for s in seen) / 100)
                print(f"  {delays}, {name}: {rates[delays][name][-1]:.0f}/s", flush=True)
    gains = {d: [a / b for a, b in zip(of["stale, s=8"], of["sync"], strict=True)] for d, of in rates.items()}
    claims += [
        Claim(name="passing delays: rate of stale over sync", ratios=gains[PASSING], at_least=1.5),
        Claim(name="passing delays: idle share with stale", ratios=idle[PASSING]["stale, s=8"], at_most=0.10),
        Claim(name="always slow: rate of stale over sync", ratios=gains[ALWAYS], at_most=1.15),
    ]
    return rates, idle


def _bounds(rounds: int) -> dict[str, tuple[float, float]]:
    """Steps and seconds to a loss with passing delays: more steps in a second, each of them worth less."""
    found: dict[str, tuple[float, float]] = {}
    arms = {f"stale, s={s}": (SERVER, "strategy.consistency=stale", f"strategy.max_staleness={s}") for s in BOUNDS}
    for name, words in {"sync": CONSISTENCIES["sync"], **arms, "async": CONSISTENCIES["async"]}.items():
        job = Delayed(often=True, lr=LR if name == "sync" else LR / WORKERS)
        each = [
            _time_to(TARGET_LOSS, observe(words, job, workers=WORKERS, shards=1, steps=DELAYED_STEPS)[:WORKERS])
            for _ in range(rounds)
        ]
        steps, seconds = (statistics.median(values) for values in zip(*each, strict=True))
        found[name] = steps, seconds
        print(f"  {name}: {steps:.0f} steps, {seconds:.2f} s", flush=True)
    return found


def draw(rates: Measured, to_target: Mapping[str, tuple[float, float]], path: Path) -> None:
    """Rates under the two kinds of delay, and the time to a loss, as a PNG."""
    from matplotlib.figure import Metric

    figure = Metric(figsize=(9.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (delays, colour) in enumerate({PASSING: "#0072B2", ALWAYS: "#D55E00"}.items()):
        heights = [statistics.median(values) for values in rates[delays].values()]
        places = [place + 0.38 * (number - 0.5) for place in range(len(heights))]
        bars = left.bar(places, heights, width=0.36, color=colour, label=delays)
        left.bar_label(bars, fmt="{:.0f}", fontsize=8)
    left.set_xticks(range(len(CONSISTENCIES)), list(CONSISTENCIES))
    left.set_ylabel(f"gradients/s of {WORKERS} workers")
    left.set_ylim(0, 1.45 * max(statistics.median(v) for of in rates.values() for v in of.values()))
    left.legend(frameon=False, loc="upper left", fontsize=8)
    left.set_title("Who waits less, computes more", loc="left", fontweight="bold")
    names = [name.removeprefix("stale, ") for name in to_target]
    right.plot(range(len(names)), [seconds for _, seconds in to_target.values()], marker="o", color="#0072B2")
    right.set_xticks(range(len(names)), names, fontsize=8)
    right.set_ylim(bottom=0)
    right.set_ylabel(f"seconds to a loss of {TARGET_LOSS}")
    right.set_title("and is there sooner, with passing delays", loc="left", fontweight="bold")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


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
            over = [a / b for a, b in zip(seconds, times["ddp"], strict=True)]
            waiting_ms = 1e3 * middle * waited[name] / 100
            rows.append(
                [f"{size_mb} MB", name, f"{1e3 * middle:.1f}", f"{waiting_ms:.1f}", f"{statistics.median(over):.2f}"]
            )
            print("  " + ", ".join(rows[-1]), flush=True)
            if name != "ddp" and size_mb == 4:
                claims.append(Claim(name=f"4 MB, {name}: step over that of ddp", ratios=over, at_most=2.0))
    return table(["parameters", "strategy", "median step, ms", "of it waiting for shards, ms", "over ddp"], rows)


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
    """What each rank saw after five steps of warm-up."""
    words = [*words, f"strategy.num_workers={workers}", f"train.steps={forked.WARM_UP_STEPS + steps}", "job=digits"]
    return forked.train([*words, f"strategy.num_shards={shards}"] if shards else words, job, watch)


def watch(strategy: Strategy, config: Config) -> Seen:
    if isinstance(strategy.job, Delayed):
        strategy.job.chance.seed(strategy.context.global_rank)
    return forked.time_steps(strategy, config)


if __name__ == "__main__":
    main()
