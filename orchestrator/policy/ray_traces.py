"""What earlier Rays have left on a machine, and how it hinders the next ``ray start``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.config.text import first_few
from orchestrator.protocol.finding import Finding

GCS_PORT, DASHBOARD_PORT = 6379, 8265
"""The default ports of a head."""
_CHECK = "old Rays"


@dataclass(frozen=True, kw_only=True)
class RayTraces:
    """What is left of Rays on this machine.

    Attributes:
        folder: the directory of Ray's sessions.
        recorded: the address that the last ``ray start`` has recorded there; None without one.
        recorded_answers: whether a Ray answers at it.
        dead_heads: the addresses of heads that do not answer, of which nodes run here.
        ended_sessions: the directories of sessions without a process.
        taken_ports: the programs that listen on the default ports of a head, by port.
    """

    folder: str
    recorded: str | None
    recorded_answers: bool
    dead_heads: Sequence[str]
    ended_sessions: Sequence[str]
    taken_ports: Mapping[int, str]


def check_traces(traces: RayTraces) -> Iterator[Finding]:
    """Yield what hinders a start of Ray, and what may be deleted."""
    if traces.recorded is not None and not traces.recorded_answers:
        text = f"{traces.folder}/ray_current_cluster names a head at {traces.recorded}, where no Ray answers"
        remedy = "if that head is gone, run `ray stop --force` and delete the file: cluster=auto and `ray` would use it"
        yield Finding(check=_CHECK, level="warning", text=text, remedy=remedy)
    if traces.dead_heads:
        text = f"nodes run here whose heads do not answer: {first_few(traces.dead_heads)}"
        remedy = "end them with `ray stop --force` before the next `ray start`, which may wait for them"
        yield Finding(check=_CHECK, level="warning", text=text, remedy=remedy)
    if not traces.recorded_answers:
        for port, program in traces.taken_ports.items():
            option = "--port" if port == GCS_PORT else "--dashboard-port"
            text = f"port {port}, which `ray start --head` takes, is used by {program}"
            remedy = f"end that program, or give another port with {option}"
            yield Finding(check=_CHECK, level="warning", text=text, remedy=remedy)
    if traces.ended_sessions:
        names = first_few(traces.ended_sessions, 2)
        text = f"{len(traces.ended_sessions)} sessions in {traces.folder} have ended: {names}"
        yield Finding(check=_CHECK, level="ok", text=text, remedy="their logs may be deleted")
