"""A job that prints where its process listens, apart from what Ray has opened there before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import psutil
from torch import Tensor

from jobs.digits import Digits


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@dataclass(frozen=True, kw_only=True)
class Listening(Digits):
    before: set[tuple[str, int]] = field(default_factory=set, init=False, repr=False)

    def check(self) -> None:
        self.before.update(_listening())

    def loss(self, output: Any, target: Any) -> Tensor:
        print("listens on", sorted({address for address, _ in _listening() - self.before}))
        return super().loss(output, target)
