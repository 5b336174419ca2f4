"""Which worker gets which rank."""

import pytest

from helpers.machines.plans import worker_on
from orchestrator.planning.mesh import Mesh
from orchestrator.policy.worker_gpus import groups_on_one_node, placement_note, rank_order, servers_last
from orchestrator.protocol.messages import WorkerInfo


def test_ranks_follow_nodes_and_gpu_numbers() -> None:
    """As numbers: GPU 10 after 2, node .10 after .9."""
    places = [worker_on("10.0.0.10", 0), worker_on("10.0.0.9", 10), worker_on("10.0.0.9", 2)]
    assert rank_order(places) == [2, 1, 0]


@pytest.mark.parametrize(
    ("nodes", "num_servers", "expected"),
    [
        ("aaaa", 0, [0, 1, 2, 3]),
        ("aaaa", 2, [0, 1, 3, 2]),
        ("aabb", 1, [0, 1, 2, 3]),
        ("aabb", 2, [0, 2, 3, 1]),
        ("aaab", 1, [0, 1, 3, 2]),
        ("aaab", 2, [0, 1, 2, 3]),
        ("aabbcc", 3, [0, 2, 4, 5, 3, 1]),
    ],
)
def test_servers_come_last_and_spread_over_the_nodes(nodes: str, num_servers: int, expected: list[int]) -> None:
    places = [WorkerInfo(node_id=n, node_ip=f"10.0.0.{ord(n)}", hostname=n, pid=1) for n in nodes]
    assert servers_last(places, range(len(nodes)), num_servers=num_servers) == expected


def on_nodes(nodes: str) -> list[WorkerInfo]:
    return [WorkerInfo(node_id=n, node_ip=f"10.0.0.{ord(n)}", hostname=f"gpu-{n}", pid=1) for n in nodes]


@pytest.mark.parametrize(
    ("nodes", "group_size", "expected"),
    [
        ("aaabbb", 1, [0, 1, 2, 3, 4, 5]),
        ("aaaabb", 2, [0, 1, 2, 3, 4, 5]),
        ("aaabbb", 2, [0, 1, 3, 4, 2, 5]),
        ("aaabbc", 2, [0, 1, 3, 4, 2, 5]),
        ("abbcc", 2, [1, 2, 3, 4, 0]),
        ("aabb", 4, [0, 1, 2, 3]),
    ],
)
def test_groups_of_ranks_share_a_node_where_one_has_room(nodes: str, group_size: int, expected: list[int]) -> None:
    assert groups_on_one_node(on_nodes(nodes), range(len(nodes)), group_size=group_size) == expected


def test_what_crosses_nodes_is_named_after_the_start() -> None:
    pipelines = Mesh(replicate=3, pipeline=2)
    assert placement_note(pipelines, on_nodes("aabbcc")) is None
    assert placement_note(pipelines, on_nodes("aabbac")) == (
        "activations go through the network in 1 of 3 pipelines: 2 (gpu-a, gpu-c)"
    )
    stages = Mesh(replicate=2, pipeline=2, replicas_close=True)
    assert placement_note(stages, on_nodes("aabb")) is None
    assert placement_note(stages, on_nodes("abab")) == (
        "gradients go through the network in 2 of 2 stages: 0 (gpu-a, gpu-b), 1 (gpu-a, gpu-b)"
    )
    parts = Mesh(replicate=2, shard=2)
    assert placement_note(parts, on_nodes("aabb")) is None
    assert placement_note(parts, on_nodes("aabc")) == (
        "parameters go through the network in 1 of 2 replicas: 1 (gpu-b, gpu-c)"
    )
    assert placement_note(Mesh(replicate=4), on_nodes("abab")) is None
    for one in (Mesh(pipeline=4), Mesh(shard=4)):
        assert placement_note(one, on_nodes("abab")) is None, "it is where it can be"
    many = placement_note(Mesh(replicate=99, pipeline=2), on_nodes("ab" * 99))
    assert many.endswith("3 (gpu-a, gpu-b), and 95 more")
