"""Whether nodes can run workers, decided from their reports; and the report of this machine."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers.files.golden import Golden
from orchestrator.driver.nodes.node_reports import driver_report
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import check_sharing, fault_lines, node_errors, without_excluded
from orchestrator.protocol.node_report import NodeReport, NoReport
from orchestrator.worker.process import node_facts

DRIVER = NodeReport(
    name="head",
    address="10.0.0.1",
    python="3.11.4",
    ray="2.60.0",
    torch="2.13.0+cpu",
    orchestrator="0.1.0",
    code="0123abcd",
)
NODE = replace(DRIVER, name="node2", address="10.0.0.2", torch="2.13.0+cu128")


def test_nodes_like_the_driver_can_run_workers_also_with_another_build_of_torch() -> None:
    assert node_errors([DRIVER, NODE, replace(NODE, python="3.11.9")], DRIVER) == []


def test_each_difference_is_named_with_its_node_and_the_remedy(golden: Golden) -> None:
    """Nodes with the same fault share a line."""
    different = [
        replace(NODE, python="3.12.1"),
        replace(NODE, torch="2.12.0"),
        replace(NODE, orchestrator=None, code=None, import_error="x"),
        replace(NODE, code="ffff"),
        replace(NODE, import_error="my.job (no module my)"),
        NoReport(name="node2", address="10.0.0.2", reason="did not answer"),
        *(replace(NODE, name=f"node{i}", address=f"10.0.0.{i}", torch=None) for i in range(2, 8)),
    ]
    faults = [*check_sharing(replace(NODE, sees_output_dir=False), "/runs"), *check_sharing(NODE, "/runs")]
    golden("errors/nodes", "\n".join([*node_errors([DRIVER, *different], DRIVER), *fault_lines(faults)]))


def test_nodes_are_excluded_by_name_or_address() -> None:
    nodes = [Node(node_id=str(i), name=f"node{i}", cpus=1, gpus=0, address=f"10.0.0.{i}") for i in range(4)]
    kept = without_excluded(nodes, ["node1", "10.0.0.3", "unknown"])
    assert [node.name for node in kept] == ["node0", "node2"]


def test_a_process_reports_its_own_machine() -> None:
    report = driver_report()
    assert report.name == socket.gethostname()
    assert report.python == ".".join(map(str, sys.version_info[:3]))
    assert report.torch is not None
    assert report.code == node_facts.code_hash()
    assert report.memory_bytes > 0
    facts = node_facts.node_facts(address="127.0.0.1", modules=["jobs.digits", "no_such_module"])
    assert facts["interface"] == "lo"
    assert facts["import_error"] == "no_such_module (ModuleNotFoundError: No module named 'no_such_module')"


EIGHT_GPUS = """
import os

class cuda:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    device_count = lambda: len(cuda.visible)
    get_device_name = lambda i: "H100"

def ones(size, *, device):
    if cuda.visible[int(device.removeprefix("cuda:"))] == "3":
        raise RuntimeError("CUDA error: it has fallen off the bus")
    return One()

class One:
    add_ = lambda self, other: self
    item = lambda self: 2.0
"""
"""A torch of a machine with eight GPUs, of which number 3 is broken."""


@pytest.mark.parametrize(
    ("visible", "managed", "seen", "error"),
    [
        (None, 8, 8, "GPU 3: CUDA error: it has fallen off the bus"),
        (None, 2, 8, None),
        ("0,1,2,4", 4, 4, None),
        ("5,3", 2, 2, "GPU 3: CUDA error: it has fallen off the bus"),
    ],
    ids=["all", "Ray manages others", "hidden", "numbered as Ray does"],
)
def test_only_the_gpus_that_ray_manages_have_to_work(
    visible: str | None, managed: int, seen: int, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``CUDA_VISIBLE_DEVICES`` of the `ray start` hides a broken GPU, so it says nothing about the node."""
    (tmp_path / "torch.py").write_text(EIGHT_GPUS)
    monkeypatch.syspath_prepend(tmp_path)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = node_facts.node_facts(num_gpus=managed, try_gpus=True)
    assert (facts["gpus"], facts["gpu_error"]) == (["H100"] * seen, error)


DISPLAY, LARGE, LARGER = "GPU-5ac1, 4096, [N/A]", "GPU-5ac2, 24576, Disabled", "GPU-7d00, 49152, Disabled"
DIVIDED = "GPU-9e33, 81920, Enabled"
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("listed", "managed", "environment", "mib"),
    [
        ([LARGE, LARGER], 2, {}, 24576),
        ([DISPLAY, LARGE], 0, {}, 0),
        ([DISPLAY, LARGE], 1, {"CUDA_VISIBLE_DEVICES": "1"}, 24576),
        ([DISPLAY, LARGE], 1, {"CUDA_VISIBLE_DEVICES": "0"}, 24576),
        ([DISPLAY, LARGE], 1, {"CUDA_VISIBLE_DEVICES": "0"} | BY_BUS, 4096),
        ([DISPLAY, LARGE, LARGER], 1, {}, 49152),
        ([DISPLAY, LARGE, LARGER], 2, {"CUDA_VISIBLE_DEVICES": "1, 2"} | BY_BUS, 24576),
        ([DISPLAY, LARGE, LARGER], 1, {"CUDA_VISIBLE_DEVICES": "2,0"} | BY_BUS, 49152),
        ([DISPLAY, LARGE, LARGER], 2, {"CUDA_VISIBLE_DEVICES": "GPU-7,GPU-5ac2"}, 24576),
        ([DISPLAY, LARGE, LARGER], 1, {"CUDA_VISIBLE_DEVICES": "GPU-5ac"}, 0),
        ([DISPLAY], 1, {"CUDA_VISIBLE_DEVICES": "MIG-9e33"}, 0),
        ([LARGE, DIVIDED], 2, {}, 0),
        ([LARGE, DIVIDED], 1, {} | BY_BUS, 24576),
        ([LARGE, "GPU-0b, [N/A], [N/A]"], 2, {}, 0),
        ([DIVIDED, LARGE], 1, {}, 0),
        ([LARGE], 2, {}, 0),
        (["No devices were found"], 1, {}, 0),
    ],
)
def test_the_memory_of_a_gpu_is_that_of_the_smallest_that_ray_manages(
    listed: list[str],
    managed: int,
    environment: dict[str, str],
    mib: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small card for a display is none of them. CUDA counts from the fastest, if it is not told otherwise."""
    program = tmp_path / "nvidia-smi"
    program.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in listed)]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert node_facts.memory(managed, environment)["gpu_memory_bytes"] == mib * 2**20


def test_the_report_needs_no_orchestrator(tmp_path: Path) -> None:
    """As on a node where the package is missing."""
    assert elsewhere(tmp_path, "facts = node_facts(); print(facts['orchestrator'], facts['code'])") == "None None\n"


def test_the_hash_changes_with_the_code(tmp_path: Path) -> None:
    package = tmp_path / "orchestrator"
    package.mkdir()
    hashes = set()
    for text in ("a = 1\n", "a = 2\n"):
        (package / "__init__.py").write_text(text)
        hashes.add(elsewhere(tmp_path, "print(code_hash())"))
    assert len(hashes) == 2


def elsewhere(folder: Path, code: str) -> str:
    """What ``code`` prints in a Python that finds ``node_facts`` and psutil, but none of our packages."""
    shutil.copy(node_facts.__file__, folder)
    paths = [str(folder), str(Path(psutil.__file__).parents[1])]
    code = f"import sys; sys.path += {paths}; from node_facts import *; {code}"
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
