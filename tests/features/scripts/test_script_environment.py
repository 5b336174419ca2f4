"""The variables of a script's ranks: what torchrun sets, for every place in a gang."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server import local_elastic_agent

from helpers.ranks.script_runs import assignment
from orchestrator.features.scripts.child_process import installed_packages, script_environment
from orchestrator.protocol.messages import Assignment, Place

PLACES = (Place(0, 2), Place(0, 5), Place(1, 0), Place(0, 7))


def environment(orders: Assignment, rank: int, own: dict[str, str] | None = None) -> dict[str, str]:
    orders = replace(orders, global_rank=rank)
    paths = {name: Path(f"/{name}") for name in ("reports", "errors", "checkpoints")}
    return script_environment(own or {}, orders, record=None, **paths)


def test_each_variable_of_torchrun_is_set(tmp_path: Path) -> None:
    source = inspect.getsource(local_elastic_agent.LocalElasticAgent._start_workers)
    expected = set(re.findall(r'^ +"([A-Z_]+)": ', source, re.MULTILINE)) | {"LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"}
    assert len(expected) > 15
    assert expected - environment(assignment(tmp_path), 0).keys() == set()


def test_ranks_count_on_their_node_and_see_its_gpus(tmp_path: Path) -> None:
    orders = replace(assignment(tmp_path, world_size=4, places=PLACES), failures=2)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    found = [tuple(environment(orders, rank)[name] for name in names) for rank in range(4)]
    assert found == [
        ("0", "0", "3", "0", "2", "2,5,7"),
        ("1", "1", "3", "0", "2", "2,5,7"),
        ("2", "0", "1", "1", "2", "0"),
        ("3", "2", "3", "0", "2", "2,5,7"),
    ]
    one = environment(orders, 3)
    assert (one["WORLD_SIZE"], one["TORCHELASTIC_RESTART_COUNT"]) == ("4", "2")
    assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("127.0.0.1", "1")


def test_the_variables_of_the_worker_stay_unless_torchrun_sets_them(tmp_path: Path) -> None:
    own = {"HOME": "/h", "RANK": "9", "PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "3"}
    found = environment(assignment(tmp_path), 1, own)
    assert (found["HOME"], found["RANK"], found["PYTHONUNBUFFERED"]) == ("/h", "1", "")
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "3")


def test_packages_that_only_the_worker_has_come_first(tmp_path: Path) -> None:
    added = "/tmp/pip/lib/python3.11/site-packages"
    assert installed_packages(["", "/work", added, f"{sys.prefix}/lib/python3.11/site-packages"]) == [added]
    orders = assignment(tmp_path)
    paths = {name: Path(f"/{name}") for name in ("reports", "errors", "checkpoints")}
    own = {"PYTHONPATH": "/mine"}
    assert script_environment(own, orders, packages=[added], record=None, **paths)["PYTHONPATH"] == f"{added}:/mine"
    assert script_environment(own, orders, record=None, **paths)["PYTHONPATH"] == "/mine"


def test_only_rank_0_logs_to_the_run_on_the_tracking_server(tmp_path: Path) -> None:
    orders = assignment(tmp_path)
    config = orders.config
    tracking = replace(config.tracking, uri="http://mlflow", experiment="e")
    environment_ = replace(orders.environment, config=replace(config, tracking=tracking))
    orders = replace(orders, environment=environment_, tracked_as="abc")
    found = environment(orders, 0)
    assert {name: value for name, value in found.items() if name.startswith("MLFLOW")} == {
        "MLFLOW_TRACKING_URI": "http://mlflow",
        "MLFLOW_EXPERIMENT_NAME": "e",
        "MLFLOW_RUN_ID": "abc",
    }
    for other in (environment(orders, 1), environment(replace(orders, tracked_as=None), 0)):
        assert not any(name.startswith("MLFLOW") for name in other)


def test_the_worker_reads_its_orders_without_torch(tmp_path: Path) -> None:
    program = """
import sys
from orchestrator.features.scripts.script_actor import Assignment
Assignment.unpacked(sys.stdin.buffer.read(), global_rank=0)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], input=assignment(tmp_path).packed(), check=True, timeout=60)


SURROUNDINGS = """
import json, os, sys, threading
main, own = sys.modules["__main__"], sys.modules["sitecustomize"].__file__
print(json.dumps([dict(os.environ), sys.path, sys.argv, sorted(vars(main)), threading.active_count(), own]))
"""


@pytest.mark.parametrize("pythonpath", ["{}", "{}:/elsewhere"])
def test_a_script_finds_nothing_of_what_tells_its_flight_record(pythonpath: str, tmp_path: Path) -> None:
    """Nor do the processes that it starts. The user's own ``sitecustomize`` is imported."""
    (tmp_path / "sitecustomize.py").touch()
    (script := tmp_path / "train.py").write_text(SURROUNDINGS)
    own = {"PYTHONPATH": pythonpath.format(tmp_path)}
    paths = {name: tmp_path / name for name in ("reports", "errors", "checkpoints")}
    plain = script_environment(own, assignment(tmp_path), record=None, **paths)
    asked = script_environment(own, assignment(tmp_path), record=tmp_path / "record", **paths)
    command = [sys.executable, script, "--lr", "0.1"]
    found = [
        json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
        for env in (plain, asked)
    ]
    assert (tmp_path / "record").is_socket()
    assert found[0] == found[1]
    assert found[1][5] == str(tmp_path / "sitecustomize.py")
