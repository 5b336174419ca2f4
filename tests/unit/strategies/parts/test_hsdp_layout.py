"""The grid of ``hsdp`` on nodes: ``strategy.shard_size=auto``, and what is said of a size that crosses nodes."""

import pytest

from helpers.machines.plans import plan_of
from orchestrator.planning.plan import Node


def boxes(*gpus: int) -> tuple[Node, ...]:
    return tuple(Node(node_id=str(i), name=f"box{i}", cpus=16, gpus=n) for i, n in enumerate(gpus))


def grid(gpus: tuple[int, ...], *words: str) -> tuple[tuple[int, int], str]:
    """Replicas x workers of each, and the notes."""
    plan = plan_of(boxes(*gpus), "strategy=hsdp", *words)
    return (plan.mesh.replicate, plan.mesh.shard), "; ".join(plan.notes)


@pytest.mark.parametrize(
    ("gpus", "words", "expected", "said"),
    [
        ((8, 8), [], (2, 8), "strategy.shard_size=auto: 8, 2 replicas, each on one node"),
        ((8, 8, 8, 4), [], (3, 8), "each on one node"),
        ((8, 4), [], (3, 4), "each on one node"),
        ((8, 6), [], (2, 6), "each on one node"),
        ((8, 8), ["recovery.spares=1"], (2, 7), "each on one node"),
        ((8, 8), ["strategy.num_workers=12"], (2, 6), "each on one node"),
        ((8, 6), ["strategy.num_workers=14"], (7, 2), "each on one node"),
        ((8,), [], (2, 4), "2 replicas on one node, where strategy=fsdp takes less memory"),
        ((8, 8), ["strategy.num_workers=8"], (2, 4), "2 replicas on one node"),
        ((1, 1, 1, 1), [], (2, 2), "2 replicas, some of which cross nodes"),
        ((8, 7), ["strategy.num_workers=15"], (3, 5), "3 replicas, some of which cross nodes"),
        ((8,), ["strategy.num_workers=32", "cluster.autoscaling=true"], (4, 8), "each on one node"),
    ],
)
def test_auto_takes_the_workers_of_a_node(
    gpus: tuple[int, ...], words: list[str], expected: tuple[int, int], said: str
) -> None:
    chosen, notes = grid(gpus, *words)
    assert chosen == expected
    assert said in notes


@pytest.mark.parametrize(
    ("gpus", "size", "workers", "better"),
    [((8, 8), 4, 16, None), ((4, 4, 4), 6, 12, 4), ((8, 8), 16, 32, 8), ((1, 1, 1, 1), 2, 4, None)],
)
def test_a_size_that_crosses_nodes_without_need_is_said_with_the_better_one(
    gpus: tuple[int, ...], size: int, workers: int, better: int | None
) -> None:
    words = (f"strategy.shard_size={size}", f"strategy.num_workers={workers}", "cluster.autoscaling=true")
    chosen, notes = grid(gpus, *words)
    assert chosen == (workers // size, size)
    said = "" if better is None else f"; strategy.shard_size={better} keeps each on one"
    assert ("through the network" in notes) == (better is not None)
    assert said in f"; {notes}"
