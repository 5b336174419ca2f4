"""The time to plan a run for 1,024 GPUs on 128 nodes and for 8,192 on 1,024, without Ray.

python benchmarks/planning_scale.py

Timed are the checks of all sizes that the run may have, the plan that it starts with, its table and its record for
`run.json`; and for elastic runs the decision which worker gets which rank after one was lost. The check of the job is
left out: it builds the model, whose size does not depend on the cluster.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from harness.disturbance import undisturbed
from harness.rounds import Claim, argument_parser, report, table

from orchestrator.config.compose import compose
from orchestrator.display.report import plan_table
from orchestrator.driver.preflight.child_checks import plan_sizes
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
    """The seconds of each plan, the number of sizes planned, and the seconds to give ranks to workers again."""

    plan_s: Sequence[float]
    num_sizes: int
    reassign_s: float


def measure(num_gpus: int, words: tuple[str, ...], rounds: int) -> Timing:
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
        plan_s=[seconds for seconds, _ in planned],
        num_sizes=len(sizes.meshes),
        reassign_s=max(seconds for seconds, _ in reassigned),  # the first makes the plan
    )


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that ``call`` takes, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    claims, rows = [], []
    for num_gpus, goal_s in GOALS_S.items():
        for name, words in overrides(num_gpus).items():
            timing = undisturbed(partial(measure, num_gpus, words, 1 if arguments.quick else ROUNDS))
            claims.append(Claim(name=f"{num_gpus:,} GPUs, {name}, s", ratios=timing.plan_s, at_most=goal_s))
            reassign = f"{1e3 * timing.reassign_s:.0f} ms" if timing.num_sizes > 1 else ""
            rows.append([f"{num_gpus:,}", name, f"{timing.num_sizes:,}", reassign])
            print("  ".join(claims[-1].row()), flush=True)
    notes = table(["GPUs", "run", "sizes", "to reassign ranks"], rows)
    report("planning-scale", claims, ceiling=None, rounds={}, notes=notes, keep=not arguments.quick)


if __name__ == "__main__":
    main()
