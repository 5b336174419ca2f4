"""Events of a run, and what the console prints of them."""

import io
import re
from typing import IO

from orchestrator.display.chosen_metrics import ChosenMetrics
from orchestrator.display.console import make_console
from orchestrator.protocol.events import (
    CheckpointSaved,
    Event,
    GenerationStarted,
    MetricsLogged,
    RankProgress,
    RunEnded,
    RunStarted,
    WorkerFailed,
)

START = 1_000_000.0
STARTED = RunStarted(
    time=START, name="digits-ddp", run_dir="/runs/1", strategy="ddp", job="digits", world_size=2, steps=500
)
FORMED = GenerationStarted(
    time=START + 1, generation=1, backend="gloo", device="cpu", precision="fp32", workers=("node-a", "node-b")
)
FAILED = WorkerFailed(
    display_name="rank 1",
    time=START + 20,
    rank=1,
    step=412,
    reason="ValueError: item 7 is broken",
    traceback="Traceback (most recent call last):\n  File 'job.py', line 3\nValueError: item 7 is broken",
    log="/runs/1/logs/rank-1.log",
    log_tail="\x1b[31mloading\x1b[0m\rdone",
)
SAVED = CheckpointSaved(
    time=START + 9, step=40, path="/runs/1/checkpoints/40", seconds=0.03, stall_ms=1.0, size_bytes=2_100_000
)
FINISHED = RunEnded(
    time=START + 21.4,
    status="FINISHED",
    exit_code=0,
    reason="",
    summary={"steps": 500, "samples_per_s": 8210.4, "final_loss": 0.0123, "val_loss": 0.1, "val_accuracy": 0.978},
    next_commands=("orchestrator compare --last 5", "mlflow ui --backend-store-uri sqlite:////runs/m.db"),
)
KILLED = RunEnded(time=START + 12, status="KILLED", exit_code=130, reason="SIGINT", summary={})


def point(step: int, at_s: float, **figures: float) -> MetricsLogged:
    metrics = {f"{name.replace('__', '/')}": value for name, value in figures.items()}
    return MetricsLogged(time=START + at_s, step=step, metrics=metrics)


def progress(rank: int, step: int, step_ms: float | None = 6.0, node: str = "node-a") -> RankProgress:
    return RankProgress(time=START, rank=rank, step=step, phase="train", step_ms=step_ms, node=node)


def printed(*events: Event, stream: IO[str] | None = None, chosen: ChosenMetrics | None = None) -> list[str]:
    out, now = stream or io.StringIO(), START
    console = make_console(steps=500, world_size=2, chosen=chosen, stream=out, clock=lambda: now)
    for event in events:
        now = event.time
        console.emit(event)
    console.close()
    return out.getvalue().splitlines() if isinstance(out, io.StringIO) else []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What a terminal shows after all of it: rows that are long stay long."""
        rows, row = [""], 0
        for code, text in re.findall(r"\x1b\[([?0-9;]*[A-Za-z])|(\r|\n|[^\x1b\r\n]+)", self.getvalue()):
            if code.endswith("A"):
                row -= int(code[:-1] or 1)
            elif code.endswith("K"):
                rows[row] = ""
            elif text == "\n":
                row += 1
                rows += [""] * (row + 1 - len(rows))
            elif text and text != "\r":
                rows[row] += text
        return rows
