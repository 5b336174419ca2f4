"""What a check has found, for a launch that it stops and for `orchestrator doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked, in one or two words.
        level: ``fault`` if a run would fail, ``warning`` if it may fail or be slow.
        text: what was found.
        remedy: what to do; empty if nothing is to be done.
        where: the nodes that it is about, as shown to users; empty for the driver or the whole cluster.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""
    where: tuple[str, ...] = ()
