"""A job with calls of ``breakpoint()``, an error, and output in many ways."""

import logging
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jobs.digits import Digits
from orchestrator.user_code.callbacks import current_step


@dataclass(frozen=True, kw_only=True)
class Debugged(Digits):
    """Each of these happens at its step; 0: never."""

    stops_at: int = 0
    fails_at: int = 0
    prints_at: int = 0

    def loss(self, output: Any, target: Any) -> Tensor:
        step, answer = current_step(), 42
        if step == self.stops_at:
            breakpoint()
        if step == self.prints_at:
            print_in_all_ways(step)
        if step == self.fails_at:
            return look_up({"answer": answer}, "label")
        return super().loss(output, target)


def look_up(found: dict[str, Any], name: str) -> Any:
    return found[name]


def print_in_all_ways(step: int) -> None:
    print("printed at", step)
    warnings.warn("warned", stacklevel=1)
    logging.getLogger("job").warning("logged")
    os.write(1, b"written in C \xff\x00\n")
    subprocess.run(["echo", "said by a child"], check=True)
    sys.stderr.write("\r 50%\r100%\n")
    print("password", os.environ.get("DEBUGGED_PASSWORD", ""))
