"""A sweep over four strategies, recorded once, for tests of what comes after the training.

In the present recording, the parts of a step (``perf/compute_ms`` and the like) are computed from its recorded shares.

To record another one, from the repository root:

    python -m orchestrator.launch -m strategy=single,ddp,pipeline,parameter_server train.steps=300 train.log_every=5
    PYTHONPATH=tests python -m helpers.records.recorded_sweep outputs/<date>/*
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from helpers.records.tracked_runs import DEAD_PROCESS
from orchestrator.records import run_dir as rundir
from orchestrator.records.run_dir import RunDir

RECORDING = Path(__file__).with_name("recorded_sweep")
_OF_THE_MACHINE = ("driver", "location", "tracking", "mlflow_run_id")
_OF_THE_MACHINE_IN_SUMMARY = ("mlflow_run_id", "mlflow_page", "mlflow_run_page", "timeline")
_FILES = ("config.yaml", "metrics.jsonl", "events.jsonl")


def recorded_sweep(tmp_path: Path, uri: str) -> list[RunDir]:
    """Return the runs in the order in which they ran; a server has nothing of them yet."""
    tracking = {"uri": uri, "experiment": "orchestrator", "request_timeout_s": 10.0, "flush_timeout_s": 60.0}
    runs = []
    for recording in sorted(RECORDING.iterdir()):
        record = json.loads((recording / "run.json").read_text())
        run_dir = rundir.create(tmp_path / "outputs", record["name"])
        run_dir.update_record(**record, tracking=tracking, driver=DEAD_PROCESS)
        for name in _FILES:
            shutil.copy(recording / name, run_dir.path)
        runs.append(run_dir)
    return runs


def _record(run_dirs: list[Path]) -> None:
    """Replace the recording, without what describes the machine."""
    shutil.rmtree(RECORDING, ignore_errors=True)
    for number, source in enumerate(sorted(path for path in run_dirs if (path / "run.json").is_file())):
        record: dict[str, Any] = json.loads((source / "run.json").read_text())
        for key in _OF_THE_MACHINE:
            record.pop(key, None)
        for key in _OF_THE_MACHINE_IN_SUMMARY:
            record["summary"].pop(key, None)
        record["source"]["user"] = "ada"
        folder = RECORDING / f"{number}-{record['strategy']}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
        config = (source / "config.yaml").read_text()
        (folder / "config.yaml").write_text(config[config.index("job:\n") :])
        shutil.copy(source / "metrics.jsonl", folder)
        events = [json.loads(line) for line in (source / "events.jsonl").read_text().splitlines()]
        kept = [event for event in events if event["event"] in ("run_started", "run_ended")]
        for event in kept:
            event["run_dir"] = ""
            for key in _OF_THE_MACHINE_IN_SUMMARY:
                event.get("summary", {}).pop(key, None)
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))


if __name__ == "__main__":
    _record([Path(path) for path in sys.argv[1:]])
