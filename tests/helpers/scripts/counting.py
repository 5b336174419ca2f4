"""Counts steps until it is told to end, and continues from what rank 0 has saved at the last one. Imports no torch."""

import os
import signal
import sys
import time

import orchestrator

saved = orchestrator.checkpoint_dir() / "step"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
begin = step = int(saved.read_text()) if saved.exists() else 0
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
if rank == 0:
    print(f"{world_size} ranks from step {begin}, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")
while True:
    step += 1
    orchestrator.report(step=step, loss=1 / step, samples=8)
    if rank == 0:
        saved.with_suffix(".new").write_text(str(step))
        saved.with_suffix(".new").rename(saved)
    time.sleep(0.05)
