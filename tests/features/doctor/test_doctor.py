"""What the doctor says about a node, about the network and about a tracking server; and how it is shown."""

import base64
import http.server
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.files.golden import Golden
from helpers.machines.plans import config_of
from orchestrator import cli
from orchestrator.features.doctor.checks import check_cpus_of_data, check_job
from orchestrator.features.doctor.findings import as_json, exit_code, finding_text, verdict_text
from orchestrator.features.doctor.node_checks import (
    GIB,
    AllReduce,
    ClockOffset,
    check_clock,
    check_gpus,
    check_interface,
    check_limits,
    check_network,
    check_output_dir,
    check_token,
)
from orchestrator.features.tracking.uri import check_tracking
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import exposure_warning, grouped
from orchestrator.protocol.node_report import Finding, NodeReport

NODE = NodeReport(
    name="node2",
    address="10.0.0.2",
    python="3.11.4",
    ray="2.60.0",
    torch="2.13.0",
    orchestrator="0.1.0",
    code="0123abcd",
    interface="eth0",
    shm_bytes=8 * GIB,
    free_disk_bytes=100 * GIB,
    sees_output_dir=True,
    max_open_files=65536,
    memory_bytes=64 * GIB,
    gpus=("H100", "H100"),
)
FAST = AllReduce(backend="gloo", processes=2, nodes=2, address="10.0.0.1", latency_ms=0.2, bandwidth_mb_s=900)
CHANGES: tuple[dict[str, Any], ...] = (
    {"shm_bytes": GIB // 16},
    {"shm_bytes": None},
    {"max_open_files": 1024},
    {"free_disk_bytes": 2 * GIB},
    {"free_disk_bytes": GIB // 2},
    {"sees_output_dir": False},
    {"write_error": "Read-only disk"},
    {"gpu_error": "GPU 1: out of memory"},
    {"gpus": ("H100",)},
    {"gpus": ("H100",) * 3},
    {"interface": None},
)
"""One thing each that is wrong with the node."""


def about(node: NodeReport, *, num_gpus: int = 2) -> list[Finding]:
    return [*check_limits(node), *check_output_dir(node, "/runs"), *check_gpus(node, num_gpus), *check_interface(node)]


def test_what_is_said_of_a_node_of_the_network_and_of_a_server(golden: Golden) -> None:
    wrong = [finding for changes in CHANGES for finding in about(replace(NODE, **changes)) if finding.level != "ok"]
    clocks = [ClockOffset(offset_s=s, error_s=error_s) for s, error_s in ((-1.5, 0.01), (1.5, 0.6), (0.003, 0.001))]
    networks = [FAST, replace(FAST, bandwidth_mb_s=2), replace(FAST, latency_ms=40), replace(FAST, nodes=1)]
    tokens = [(True, "~/.ray/auth_token"), (False, None), (False, "~/.ray/auth_token")]
    found = [
        *about(NODE),
        *check_interface(replace(NODE, interface=None, interface_of_user="ib0")),
        *wrong,
        *grouped([*check_limits(NODE), *check_limits(replace(NODE, name="node3"))]),
        *(check_clock("node2", clock) for clock in clocks),
        *map(check_network, networks),
        *(check_tracking(uri, timeout_s=1) for uri in (None, "htp://host")),
        *(check_token(required=required, file=file) for required, file in tokens),
    ]
    golden("report/doctor", "\n".join([*map(finding_text, found), verdict_text(found), verdict_text(about(NODE))]))


def test_findings_as_json() -> None:
    fault = Finding(check="GPUs", level="fault", text="broken", where=("a (1)", "b (2)"))
    assert json.loads(json.dumps(as_json([fault])))[0]["where"] == ["a (1)", "b (2)"]


def test_the_exit_code_is_that_of_the_worst_finding() -> None:
    fine, warning, fault = (Finding(check="Ray", level=level, text="") for level in ("ok", "warning", "fault"))
    assert [exit_code(found) for found in ([], [fine], [warning, fine], [fault, warning])] == [0, 0, 1, 2]


def test_a_job_that_cannot_be_imported_is_a_fault_unless_pip_may_bring_it() -> None:
    def found(*words: str) -> list[tuple[str, str]]:
        return [(f.check, f.level) for f in check_job(config_of(*words))]

    assert found() == [("job", "ok")]
    assert found("job._target_=nowhere.Mine") == [("job", "fault")]
    assert found("job._target_=nowhere.Mine", "cluster.pip=[nowhere]") == []


def test_wrong_overrides_are_refused_before_anything_is_checked(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert cli.main(["doctor", "strategy=ddpp"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    golden.says(output.err)


class Server(http.server.BaseHTTPRequestHandler):
    """A tracking server with one user, ``ada`` with the password ``pw``."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Basic {base64.b64encode(b'ada:pw').decode()}"
        self.send_response(200 if known and "/api/2.0/mlflow/" in self.path else 401)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join(timeout=60)


def test_a_tracking_server_that_knows_the_user(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_user = check_tracking(f"http://ada:pw@{server}", timeout_s=5)
    assert (with_user.level, "pw" in with_user.text) == ("ok", False)
    assert check_tracking(f"http://{server}", timeout_s=5).level == "fault"
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pw")
    assert check_tracking(f"http://{server}", timeout_s=5).level == "ok"


def test_a_tracking_server_whose_login_or_certificate_the_environment_has(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_AUTH", "plugin")
    found = check_tracking(f"http://{server}", timeout_s=5)
    assert (found.level, "the login by MLFLOW_TRACKING_AUTH was not tried" in found.text) == ("ok", True)
    monkeypatch.delenv("MLFLOW_TRACKING_AUTH")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".mlflow").mkdir()
    saved = "[mlflow]\nmlflow_tracking_username = ada\nmlflow_tracking_password = pw\n"
    (tmp_path / ".mlflow" / "credentials").write_text(saved)
    assert check_tracking(f"http://{server}", timeout_s=5).level == "ok"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_tracking_server_with_a_certificate_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -subj /CN=me"
    command = ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pw")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        running.socket = context.wrap_socket(running.socket, server_side=True)
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        uri = f"https://127.0.0.1:{running.server_port}"
        levels = [check_tracking(uri, timeout_s=5).level]
        for name, value in (
            ("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate)),
            ("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "gone")),
            ("MLFLOW_TRACKING_INSECURE_TLS", "true"),
        ):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                levels.append(check_tracking(uri, timeout_s=5).level)
        running.shutdown()
        thread.join(timeout=60)
    assert levels == ["fault", "ok", "fault", "ok"]


def test_a_tracking_server_that_does_not_answer() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        for uri in (f"http://{address}", f"postgresql://user:hunter2@{address}/mlflow"):
            found = check_tracking(uri, timeout_s=5)
            assert found.level == "fault"
            assert "cannot be reached" in found.text
            assert "hunter2" not in found.text


def test_tracking_without_a_server(tmp_path: Path) -> None:
    assert check_tracking(f"sqlite:///{tmp_path}/mlflow.db", timeout_s=1).level == "ok"


@pytest.mark.parametrize(
    ("address", "required", "warns"),
    [
        ("10.0.0.5:6379", False, True),
        ("[fd00::5]:6379", False, True),
        ("head.example:6379", False, True),
        ("10.0.0.5:6379", True, False),
        ("127.0.0.1:6379", False, False),
        ("[::1]:6379", False, False),
        ("localhost:6379", False, False),
    ],
)
def test_a_launch_warns_of_an_open_ray_that_others_reach(address: str, required: bool, warns: bool) -> None:
    assert (exposure_warning(address, required=required) is not None) == warns


def test_the_cpus_of_a_cluster_that_workers_leave_for_data_are_told(golden: Golden) -> None:
    nodes = tuple(Node(node_id=name, name=name, cpus=2, gpus=0) for name in ("a", "b"))
    found = [
        finding_text(finding)
        for workers in (2, 4, 5)
        for finding in check_cpus_of_data(config_of("strategy=ddp", f"strategy.num_workers={workers}"), nodes)
    ]
    golden.says("\n".join(found))
