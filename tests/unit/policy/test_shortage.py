"""Why a run waits: the sentence about what is free and who holds the rest."""

import time

from helpers.files.golden import Golden, sections
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


def test_why_a_run_waits(golden: Golden) -> None:
    silent, left_out = node(2, trouble="does not answer"), node(2, trouble="is left out by cluster.exclude_nodes")
    full = node(2, free_gpus=0)
    large = [node(n, free_gpus=0) for n in range(1, 200)]
    many = tuple(held(n, f"run {i}", 0.25) for n in range(1, 200) for i in range(8))
    cpus = (node(1, free_cpus=6.5), node(2))
    run_a, since_yesterday, again = (held(2, "run a", 1, hours=hours) for hours in (1, 30, 2))
    texts = {
        "held by a run": sentence(FOUR, node(1), node(2, free_gpus=1, free_cpus=7), holdings=(run_a,)),
        "held by a run since yesterday": sentence(FOUR, node(1), full, holdings=(since_yesterday,)),
        "held twice by a run": sentence(FOUR, node(1), full, holdings=(run_a, again)),
        "enough": sentence(Request(count=9, each={"CPU": 1}), *cpus),
        "CPUs held by others": sentence(Request(count=16, each={"CPU": 1}), *cpus),
        "a silent node": sentence(Request(count=2, each=FOUR.each), node(1, free_gpus=1), silent),
        "a node that is left out": sentence(FOUR, node(1), left_out),
        "too few nodes": sentence(FOUR, node(1)),
        "too few nodes so far": sentence(FOUR, node(1), autoscaling=True),
        "no node that is large enough": sentence(Request(count=3, each={"GPU": 1}, one_node=True), node(1), node(2)),
        "a large cluster": sentence(Request(count=8, each={"GPU": 1}), *large, holdings=many),
    }
    golden("report/shortage", sections({title: [text] for title, text in texts.items()}))


def test_what_can_ever_fit() -> None:
    silent = node(2, trouble="does not answer")
    assert room(FOUR, ClusterState(nodes=[node(1), silent])) == 2
    assert not can_ever_fit(FOUR, ClusterState(nodes=[node(1), silent]))
    assert not can_ever_fit(FOUR, ClusterState(nodes=[node(1)]))
    assert can_ever_fit(FOUR, ClusterState(nodes=[node(1), node(2, free_gpus=0)]))
    one_node = Request(count=3, each={"GPU": 1}, one_node=True)
    assert room(one_node, ClusterState(nodes=[node(1), node(2)])) == 2


def test_fractions_of_a_resource_fill_it_exactly() -> None:
    tenth = Request(count=10, each={"CPU": 0.1})
    assert (
        room(tenth, ClusterState(nodes=[NodeState(node_id="", name="", address="", total={"CPU": 1}, free={"CPU": 1})]))
        == 10
    )
