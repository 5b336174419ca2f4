"""The time to plan a run for 1,024 GPUs on 128 nodes and for 8,192 on 1,024, without Ray.

python benchmarks/planning_scale.py

Timed are the checks of all sizes that the run may have, the plan that it starts with, its table and its record for
`run.json`; and for elastic runs the decision which worker gets which rank after one was lost. The check of the job is
left out: it builds the model, whose size does not depend on the cluster.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rounds import RESULTS, argument_parser, table

from orchestrator.config.compose import compose
from orchestrator.display.report import plan_table
from orchestrator.driver.preflight.size_plans import plan_sizes
from orchestrator.planning.plan import Node
from orchestrator.policy.elastic import Sizes, find_rank_assignment
from orchestrator.strategies import registry

T = TypeVar("T")

GPUS_PER_NODE = 8
SAMPLES_PER_WORKER = 16
GOALS_S = {1024: 1.0, 8192: 5.0}
"""By the number of GPUs."""
ROUNDS = 5
REPLICATED_PIPELINE = (
    "strategy=ddp_pipeline",
    f"strategy.pipeline_parallel_size={GPUS_PER_NODE}",
    f"strategy.num_microbatches={SAMPLES_PER_WORKER}",
)


def overrides(num_gpus: int) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each run that is planned."""
    most = f"strategy.num_workers={num_gpus}"
    return {
        "ddp": ("strategy=ddp", most),
        "pipeline": ("strategy=pipeline", most, "strategy.schedule=GPipe"),
        "ddp_pipeline": (*REPLICATED_PIPELINE, most),
        "ddp, elastic": ("strategy=ddp", f"strategy.num_workers=[1,{num_gpus}]"),
        "pipeline, elastic": ("strategy=pipeline", f"strategy.num_workers=[2,{num_gpus}]", "strategy.schedule=GPipe"),
        "ddp_pipeline, elastic": (*REPLICATED_PIPELINE, f"strategy.num_workers=[{GPUS_PER_NODE},{num_gpus}]"),
    }


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was planned, and the median times."""

    name: str
    num_gpus: int
    num_sizes: int
    plan_s: float
    reassign_s: float

    def row(self) -> list[str]:
        goal_s = GOALS_S[self.num_gpus]
        elastic = self.num_sizes > 1
        return [
            f"{self.num_gpus:,}",
            self.name,
            f"{self.num_sizes:,}",
            f"{self.plan_s:.2f} s",
            f"{goal_s:g} s{'' if self.plan_s <= goal_s else ' (missed)'}",
            f"{1e3 * self.reassign_s:.0f} ms" if elastic else "",
        ]


def measure(name: str, num_gpus: int, words: tuple[str, ...], rounds: int) -> Timing:
    """Plan one run ``rounds`` times."""
    batch = f"train.global_batch_size={SAMPLES_PER_WORKER * num_gpus}"
    nodes = tuple(
        Node(node_id=f"{i:x}", name=f"gpu-{i}", cpus=64, gpus=GPUS_PER_NODE) for i in range(num_gpus // GPUS_PER_NODE)
    )
    errors: list[str] = []
    config, _ = compose([*words, batch, "tracking=none"], errors, registry.config_class)
    assert config is not None, errors

    def plan() -> Sizes:
        sizes = plan_sizes(config, None, nodes, errors, oversubscribe_cpus=False)
        assert sizes is not None, errors
        plan_table(sizes.initial, nodes)
        json.dumps(dataclasses.asdict(sizes.initial))
        return sizes

    planned = [timed(plan) for _ in range(rounds)]
    sizes = planned[-1][1]
    alive = range(1, sizes.initial.world_size)
    reassigned = [timed(lambda: find_rank_assignment(sizes.initial, sizes, alive, ready=0)) for _ in range(rounds)]
    return Timing(
        name=name,
        num_gpus=num_gpus,
        num_sizes=len(sizes.meshes),
        plan_s=statistics.median(seconds for seconds, _ in planned),
        reassign_s=max(seconds for seconds, _ in reassigned),  # the first makes the plan
    )


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that ``call`` takes, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    timings = []
    for num_gpus in GOALS_S:
        for name, words in overrides(num_gpus).items():
            timings.append(measure(name, num_gpus, words, 1 if arguments.quick else ROUNDS))
            print("  ".join(timings[-1].row()), flush=True)
    head = ["GPUs", "run", "sizes", "to plan", "goal", "to reassign ranks"]
    text = table(head, [timing.row() for timing in timings])
    print(text)
    if not arguments.quick:
        (RESULTS / "planning-scale.md").write_text(f"# Planning scale\n\n{__doc__}\n{text}\n")


if __name__ == "__main__":
    main()
