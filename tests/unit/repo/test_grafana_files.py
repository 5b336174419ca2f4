"""The dashboard in ``cluster/grafana`` shows what the runs export."""

import json
import re

from helpers.files.cluster_files import CLUSTER
from orchestrator.driver.reporting import GAUGES, LABELS, NAMESPACE

DASHBOARD = json.loads((CLUSTER / "grafana" / "dashboard.json").read_text())
EXPORTED = {f"{NAMESPACE}_{name}" for name in GAUGES}
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def metrics(expression: str) -> set[str]:
    return set(re.findall(r"\b[a-z_][a-z0-9_]*\b", re.sub(r"\{[^}]*\}", "", expression)))


def test_the_panels_show_exactly_the_metrics_that_are_exported() -> None:
    assert set().union(*(metrics(target["expr"]) for target in TARGETS)) == EXPORTED


def test_queries_and_legends_use_labels_that_exist() -> None:
    for target in TARGETS:
        selected = re.findall(r"(\w+)=~", target["expr"])
        named = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert {*selected, *named} <= set(LABELS)


def test_the_variables_are_defined() -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == VARIABLES.keys()
    (metric, label) = re.findall(r"\w+", VARIABLES["run"]["query"])[1:]
    assert metric in EXPORTED
    assert label in LABELS


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for position in [panel["gridPos"]]
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
