"""A worker of an earlier generation cannot save."""

import shutil
import threading
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from helpers.records.runs import wait_for
from orchestrator.records.json_file import write_json
from orchestrator.records.lease import Lease, renew_every_s, restored_within_s
from orchestrator.records.run_dir import RunDir
from orchestrator.state.fence import Fence
from orchestrator.storage.remote import Remote


def test_without_a_fence_nobody_may_save(tmp_path: Path, golden: Golden) -> None:
    """This node may see another directory than the driver."""
    with golden.raises(FileNotFoundError):
        Fence(tmp_path / "fence", "first").may_save()


def test_a_failed_write_of_the_fence_is_made_up_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    worker = Fence(run.fence_file, "second")
    with Lease(run) as lease:
        (run.fence_file / "in the way").mkdir(parents=True)
        lease.admit("second")
        shutil.rmtree(run.fence_file)
        write_json(run.fence_file, {"generation": "first"})  # what the generation before has left
        wait_for(worker.may_save)
        run.fence_file.write_text("{")
        lease.renew()
        assert worker.may_save()


@pytest.mark.slow
@pytest.mark.parametrize("text", ['{"generation": "another"}', "{"])
def test_a_checkpoint_waits_until_a_lost_fence_is_restored(tmp_path: Path, text: str) -> None:
    file = tmp_path / "fence"
    file.write_text(text)
    restore = threading.Timer(0.3, write_json, [file, {"generation": "mine"}])
    restore.start()
    assert Fence(file, "mine", restored_within_s=20).may_save()
    restore.join()
    assert not Fence(file, "of a worker that was replaced", restored_within_s=0.1).may_save()


@pytest.mark.parametrize("remote", [None, Remote("file:///nowhere", timeout_s=1)])
def test_a_checkpoint_waits_for_more_than_one_renewal_of_the_lease(tmp_path: Path, remote: Remote | None) -> None:
    run = RunDir(tmp_path, remote)
    assert restored_within_s(run) > renew_every_s(run)
