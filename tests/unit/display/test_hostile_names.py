"""Names that mean something to the markup of Rich."""

import io

from helpers.machines.plans import plan_of
from orchestrator.display.console import make_console
from orchestrator.display.report import plan_table
from orchestrator.planning.plan import Node
from orchestrator.protocol.events import TextSampled


def test_the_console_shows_names_as_they_are() -> None:
    name = r"_$\frac$ [red]x[/blue] :smile: {} %s \1"
    nodes = (Node(node_id="a", name=name, cpus=2, gpus=0),)
    assert name in plan_table(plan_of(nodes, "strategy=ddp"), nodes)
    out = io.StringIO()
    make_console(steps=1, world_size=1, stream=out).emit(TextSampled(name=name, text=name))
    assert out.getvalue().count(name) == 2
