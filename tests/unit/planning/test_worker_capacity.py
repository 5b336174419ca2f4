"""How many workers fit on nodes."""

from __future__ import annotations

import pytest

from orchestrator.planning.mesh import Resources, workers_on_node, workers_on_nodes

SMALL, LARGE = {"CPU": 2.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("each", "available", "expected"),
    [
        ({"CPU": 1}, LARGE, 8),
        ({"CPU": 3}, LARGE, 2),
        ({"CPU": 1, "GPU": 1}, LARGE, 2),
        ({"CPU": 1, "GPU": 0}, LARGE, 8),
        ({"GPU": 1}, {"CPU": 8}, 0),
        ({"CPU": 1}, {"CPU": -1}, 0),
        ({"CPU": 0.1}, {"CPU": 1.0}, 10),
        ({"CPU": 0.1}, {"CPU": 1.0 - 7 * 0.1}, 3),
        ({"CPU": 1 / 3}, {"CPU": 1.0}, 3),
        ({"CPU": 1e-6}, {"CPU": 1.0}, 10_000),
    ],
)
def test_the_scarcest_resource_of_a_node_decides(each: Resources, available: Resources, expected: int) -> None:
    assert workers_on_node(each, available) == expected


def test_a_worker_has_all_it_needs_on_one_node() -> None:
    assert workers_on_nodes({"CPU": 1}, [{"CPU": 0.5}, {"CPU": 0.5}]) == 0


def test_nodes_add_up_unless_all_workers_share_one() -> None:
    assert workers_on_nodes({"CPU": 1}, [SMALL, LARGE]) == 10
    assert workers_on_nodes({"CPU": 1}, [SMALL, LARGE], one_node=True) == 8
    assert workers_on_nodes({"CPU": 1}, [], one_node=True) == 0
