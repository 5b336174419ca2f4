"""Reports its steps from each rank, and continues from what it has saved; rank 1 of the first attempt is killed."""

import os
import signal
import time

import orchestrator

saved = orchestrator.checkpoint_dir() / "step.txt"
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
begin = int(saved.read_text()) if saved.exists() else 0
for step in range(begin + 1, 21):
    orchestrator.report(step=step, steps=20, loss=1 / step + rank, samples=8, accuracy=step / 20)
    if rank == 0 and step == 10:
        if "MLFLOW_RUN_ID" in os.environ:
            import mlflow

            with mlflow.start_run():
                mlflow.log_metric("own", attempt, step=step)
        saved.write_text("10")
    while attempt == 0 and step == 10 and not saved.exists():
        time.sleep(0.01)
    if attempt == 0 and rank == 1 and step == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 0 and rank == 0 and step == 15:
        signal.pause()
print(f"began at {begin}, run {os.environ.get('MLFLOW_RUN_ID', 'none')}")
