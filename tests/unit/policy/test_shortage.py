"""Why a run waits: the sentence about what is free and who holds the rest."""

from __future__ import annotations

import time

import pytest

from orchestrator.policy.shortage import ClusterState, Holding, NodeState, Request, can_ever_fit, explain, room

NOW = time.mktime((2026, 5, 4, 15, 0, 0, 0, 0, -1))
HOUR_S = 3600.0


def node(number: int, *, gpus: float = 2, free_gpus: float = 2, free_cpus: float = 8, trouble: str = "") -> NodeState:
    return NodeState(
        node_id=f"n{number}",
        name=f"gpu-{number}",
        address=f"10.0.0.{number}",
        total={"CPU": 8, "GPU": gpus, "memory": 1e9},
        free={"CPU": free_cpus, "GPU": free_gpus},
        trouble=trouble,
    )


def held(number: int, holder: str, gpus: float, *, hours: float = 1) -> Holding:
    return Holding(node_id=f"n{number}", holder=holder, resources={"CPU": 1, "GPU": gpus}, since=NOW - hours * HOUR_S)


def sentence(request: Request, *nodes: NodeState, holdings: tuple[Holding, ...] = (), autoscaling: bool = False) -> str:
    return explain(request, ClusterState(nodes=nodes, holdings=holdings), autoscaling=autoscaling, now=NOW)


FOUR = Request(count=4, each={"CPU": 1, "GPU": 1})


def test_who_holds_what_is_scarce_is_named_with_node_and_time() -> None:
    text = sentence(FOUR, node(1), node(2, free_gpus=1, free_cpus=7), holdings=(held(2, "run digits-ddp-ab12", 1),))
    assert text == (
        "need 4 x {CPU: 1, GPU: 1}; free 3; node gpu-2 (10.0.0.2): 1 of 2 GPUs held by run digits-ddp-ab12 since 14:00"
    )


def test_what_no_placement_group_holds_is_left_to_other_tasks() -> None:
    text = sentence(FOUR, node(1), node(2, free_gpus=0), holdings=(held(2, "run a", 1, hours=30),))
    assert "2 of 2 GPUs held, 1 by run a since May 03 09:00, 1 by other Ray tasks" in text
    cpus = sentence(Request(count=9, each={"CPU": 1}), node(1, free_cpus=6.5), node(2))
    assert cpus == "need 9 x {CPU: 1}; free 14; Ray is about to place them"
    assert sentence(Request(count=16, each={"CPU": 1}), node(1, free_cpus=6.5), node(2)).endswith(
        "free 14; node gpu-1 (10.0.0.1): 1.5 of 8 CPUs held by other Ray tasks"
    )


def test_a_run_with_several_bundles_on_a_node_is_named_once() -> None:
    holdings = (held(2, "run a", 1, hours=1), held(2, "run a", 1, hours=2))
    assert "2 of 2 GPUs held by run a since 13:00" in sentence(FOUR, node(1), node(2, free_gpus=0), holdings=holdings)


def test_nothing_is_free_on_a_node_in_trouble() -> None:
    silent = node(2, trouble="does not answer")
    assert room(FOUR, ClusterState(nodes=[node(1), silent])) == 2
    two = Request(count=2, each=FOUR.each)
    assert "free 1; node gpu-2 (10.0.0.2) does not answer; node gpu-1" in sentence(two, node(1, free_gpus=1), silent)


def test_a_request_that_fits_only_with_a_node_in_trouble_can_never_fit() -> None:
    left_out = node(2, trouble="is left out by cluster.exclude_nodes")
    assert not can_ever_fit(FOUR, ClusterState(nodes=[node(1), left_out]))
    text = sentence(FOUR, node(1), left_out)
    assert "free 2; the cluster has room for 2 in all: add nodes, or lower strategy.num_workers" in text
    assert text.endswith("; node gpu-2 (10.0.0.2) is left out by cluster.exclude_nodes")


@pytest.mark.parametrize(
    ("autoscaling", "said"),
    [
        (False, "the cluster has room for 2 in all: add nodes, or lower strategy.num_workers"),
        (True, "the cluster has room for 2 in all; more nodes are awaited (cluster.autoscaling=true)"),
    ],
)
def test_a_request_that_can_never_fit_is_called_so(autoscaling: bool, said: str) -> None:
    assert not can_ever_fit(FOUR, ClusterState(nodes=[node(1)]))
    assert said in sentence(FOUR, node(1), autoscaling=autoscaling)


def test_one_node_must_have_room_for_all() -> None:
    request = Request(count=3, each={"GPU": 1}, one_node=True)
    assert room(request, ClusterState(nodes=[node(1), node(2)])) == 2
    assert sentence(request, node(1), node(2)).startswith("need 3 x {GPU: 1} on one node; free 2; the cluster has room")


def test_the_sentence_about_a_large_cluster_is_short() -> None:
    nodes = [node(n, free_gpus=0) for n in range(1, 200)]
    holdings = tuple(held(n, f"run {i}", 0.25) for n in range(1, 200) for i in range(8))
    text = sentence(Request(count=8, each={"GPU": 1}), *nodes, holdings=holdings)
    assert len(text) < 800
    assert text.endswith("and 195 more nodes")
    assert "1.25 by others" in text


def test_fractions_of_a_resource_fill_it_exactly() -> None:
    tenth = Request(count=10, each={"CPU": 0.1})
    assert (
        room(tenth, ClusterState(nodes=[NodeState(node_id="", name="", address="", total={"CPU": 1}, free={"CPU": 1})]))
        == 10
    )
