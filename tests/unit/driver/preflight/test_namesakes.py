"""Other runs of the same name that have not ended."""

import os
from pathlib import Path
from typing import Any

from helpers.files.golden import Golden
from orchestrator.records import run_dir as rundir
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import active_namesakes, namesake_warning


def make(folder: Path, uid: str, **record: Any) -> RunDir:
    values = {"uid": uid, "name": "gpt", "state": "waiting", "driver": this_process(), "sweep": None} | record
    run = rundir.create(folder, values["name"])
    run.update_record(**values)
    return run


def test_only_active_runs_of_the_same_name_are_found(tmp_path: Path) -> None:
    run, other = make(tmp_path, "mine"), make(tmp_path, "other", state="running")
    make(tmp_path, "ended", state="finished")
    make(tmp_path, "died", driver={**this_process(), "start_ticks": -1})
    make(tmp_path, "longer", name="my-gpt")
    long_ago = make(tmp_path, "without a fresh lease", state="running")
    os.utime(long_ago.record_file, (1e9, 1e9))
    make(tmp_path, "damaged").record_file.write_text("{")
    assert active_namesakes(run) == {"other": other.location}


def test_the_runs_of_a_sweep_share_their_name(tmp_path: Path) -> None:
    run = make(tmp_path, "mine", sweep={"id": "s1", "name": "lr"})
    make(tmp_path, "of the same sweep", sweep={"id": "s1", "name": "lr"})
    make(tmp_path, "of another", sweep={"id": "s2", "name": "lr"})
    assert active_namesakes(run).keys() == {"of another"}


def test_the_warning_says_what_to_do(golden: Golden) -> None:
    golden.says(namesake_warning("gpt", "/my runs/1"))
