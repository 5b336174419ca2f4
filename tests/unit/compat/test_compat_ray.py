"""Ray's private interfaces are where ``compat/ray`` expects them, and every patch is undone."""

import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray
import ray.exceptions

from helpers.servers.ports import free_port
from orchestrator.compat.ray import gcs, idle_agent
from orchestrator.compat.ray.connection import known_nodes, own_ray_has_died, probe_gcs
from orchestrator.compat.ray.gcs import NODE_HAS_DIED, add_job_metadata, died_with_node
from orchestrator.compat.ray.internals import Internal, MovedError, find_internal
from orchestrator.compat.ray.side_effects import environment_defaults, raylet_messages_muted, signals_kept_from_ray
from orchestrator.compat.ray_job import JOB_CONFIG_VARIABLE
from orchestrator.driver.process.calls import cause_of_death

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", Internal)
def test_ray_has_the_name(name: str) -> None:
    try:
        find_internal(name)
    except MovedError as e:
        pytest.fail(str(e))


@pytest.mark.slow
def test_a_question_whose_answer_is_lost_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another client, and not for ever; an error is no lost answer."""
    monkeypatch.setattr(gcs, "ANSWER_TIMEOUT_S", 0.2)
    state = find_internal(Internal.GCS_STATE)
    monkeypatch.setattr(state, "_global_state_accessor", "the connection")
    lost, asked = threading.Event(), list[str | None]()

    def free() -> dict[str, dict[str, float]]:
        asked.append(state._global_state_accessor)
        if len(asked) in (1, 2, *range(4, 20)):
            lost.wait(60)
        return {"one": {"CPU": 1.0}}

    monkeypatch.setattr("ray._private.state.available_resources_per_node", free)
    try:
        assert gcs.free_resources() == {"one": {"CPU": 1.0}}
        assert asked == ["the connection", None, None]
        with pytest.raises(ConnectionError, match=r"has not answered 6 questions in 1\.2 s"):
            gcs.free_resources()
    finally:
        lost.set()

    def fail() -> None:
        raise ray.exceptions.RaySystemError("not connected")

    monkeypatch.setattr("ray._private.state.available_resources_per_node", fail)
    with pytest.raises(ray.exceptions.RaySystemError, match="not connected"):
        gcs.free_resources()


@pytest.mark.parametrize("exists", [True, False])
def test_a_placement_group_whose_answer_is_lost_is_found_or_created_again(
    monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    asked = []

    def create(bundles: object, *, name: str, strategy: str) -> str:
        asked.append((bundles, name, strategy))
        if len(asked) == 1:
            raise ray.exceptions.GetTimeoutError("There was timeout in creating the placement group of id 1a.")
        return "created"

    def find(name: str) -> str:
        if not exists:
            raise ValueError(f"Failed to look up placement group with name: {name}")
        return f"found {name}"

    monkeypatch.setattr(gcs, "placement_group", create)
    monkeypatch.setattr(gcs, "get_placement_group", find)
    group = gcs.create_placement_group([{"CPU": 1}], name="run/0", strategy="PACK")
    assert (group, len(asked)) == (("found run/0", 1) if exists else ("created", 2))
    assert {name for _, name, _ in asked} == {"run/0"}


def test_a_server_that_is_started_again_is_waited_for_and_not_for_ever() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match="unavailable"):
        known_nodes(address, timeout_s=30)
    with pytest.raises(ConnectionError, match="deadline_exceeded"):
        known_nodes(address, timeout_s=0.2, outlives=True)


def test_ray_sets_the_variable_of_a_submitted_job() -> None:
    assert find_internal("ray._private.runtime_env.constants.RAY_JOB_CONFIG_JSON_ENV_VAR") == JOB_CONFIG_VARIABLE


@pytest.mark.parametrize(
    ("name", "args", "keywords"),
    [
        ("ray._private.utils.set_sigterm_handler", ["handler"], {}),
        ("ray._private.services.find_bootstrap_address", [None], {}),
        ("ray._private.grpc_utils.init_grpc_channel", ["127.0.0.1:1"], {}),
        (
            "ray._private.authentication.authentication_token_setup.maybe_enable_token_auth_if_token_available",
            [],
            {"warn_if_disabled": False},
        ),
    ],
)
def test_a_function_takes_the_arguments_that_it_is_given(
    name: str, args: list[object], keywords: dict[str, object]
) -> None:
    assert name in list(Internal)
    try:
        inspect.signature(find_internal(name)).bind(*args, **keywords)
    except TypeError as e:
        pytest.fail(f"Ray changed the arguments of {name}: {e}; see compat/ray")


@pytest.mark.parametrize(
    "name", ["ray._private.utils.no_such_function", "ray._private.no_such_module.x", "ray._private.node.NoSuch.x"]
)
def test_a_moved_name_is_reported_with_the_file_to_change(name: str) -> None:
    with pytest.raises(MovedError, match=rf"moved {re.escape(name)} .*; see compat/ray"):
        find_internal(name)


def test_patches_are_undone_even_after_an_error() -> None:
    names = [
        "ray._private.utils.set_sigterm_handler",
        "ray._private.services.ConsolePopen",
        "ray._private.worker.print_to_stdstream",
    ]
    before = [find_internal(name) for name in names]
    patched = []
    with contextlib.suppress(ZeroDivisionError), signals_kept_from_ray(), raylet_messages_muted():
        patched = [find_internal(name) for name in names]
        raise ZeroDivisionError
    assert all(now is not original for now, original in zip(patched, before, strict=True))
    assert [find_internal(name) for name in names] == before


NO_PORTS = """
from ray import _raylet as r
for name in (r.METRICS_AGENT_PORT_NAME, r.METRICS_EXPORT_PORT_NAME, r.DASHBOARD_AGENT_LISTEN_PORT_NAME):
    r.persist_port({folder!r}, {node_id!r}, name, -1)
"""
NODE_ID = "ab" * 28


def test_the_idle_agent_says_what_an_agent_without_ports_says_and_ends_with_its_parent(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    code = NO_PORTS.format(folder=str(theirs), node_id=NODE_ID)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    command = [sys.executable, "-I", "-S", idle_agent.__file__, "agent.py", f"--node-id={NODE_ID}", "--head"]
    another = {**os.environ, "RAY_RAYLET_PID": str(os.getppid())}  # so the parent has ended
    subprocess.run([*command, f"--session-dir={ours}"], env=another, check=True, timeout=60)
    said = [{path.name: path.read_text() for path in folder.iterdir()} for folder in (theirs, ours)]
    assert said[0] == said[1] != {}


def test_the_handler_of_sigterm_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals_kept_from_ray():
        find_internal("ray._private.utils.set_sigterm_handler")(signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


def test_environment_defaults_replace_nothing_and_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPAT_TEST_SET", "mine")
    monkeypatch.delenv("COMPAT_TEST_UNSET", raising=False)
    with environment_defaults({"COMPAT_TEST_SET": "theirs", "COMPAT_TEST_UNSET": "theirs"}):
        assert (os.environ["COMPAT_TEST_SET"], os.environ["COMPAT_TEST_UNSET"]) == ("mine", "theirs")
    assert os.environ["COMPAT_TEST_SET"] == "mine"
    assert "COMPAT_TEST_UNSET" not in os.environ


def test_no_ray_of_this_process_is_no_dead_ray() -> None:
    assert not own_ray_has_died()


def test_the_server_explains_the_death_of_an_actor_in_these_words() -> None:
    server = Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server"
    assert f"The actor died because {NODE_HAS_DIED}".encode() in server.read_bytes()


def test_an_actor_that_died_with_its_node_is_told_from_one_that_died_alone() -> None:
    context = find_internal("ray.core.generated.common_pb2.ActorDiedErrorContext")
    of_node = context(actor_id=bytes(16), error_message="The actor died because its node has died. Node Id: 5f")
    of_process = context(actor_id=bytes(16), error_message="The actor is dead because its worker process has died.")
    assert died_with_node(ray.exceptions.ActorDiedError(of_node))
    assert not died_with_node(ray.exceptions.ActorDiedError(of_process))
    assert cause_of_death(ray.exceptions.ActorDiedError(of_node)) == "node lost"
    assert cause_of_death(ray.exceptions.ActorDiedError(of_process)) == "unknown"


def test_a_port_without_a_server_is_unavailable() -> None:
    assert probe_gcs("127.0.0.1:9", timeout_s=2) == "unavailable"


KEEP_TITLE = """
import psutil, ray
from orchestrator.compat.ray.side_effects import keep_process_title
for title in ("rank-0 a run", "rank-1 a run"):
    keep_process_title(title)
    with ray._private.worker._changeproctitle("ray::Worker.heartbeat", "ray::Worker"):
        pass
    print(" ".join(psutil.Process().cmdline()).strip())
"""


def test_a_title_stays_until_it_is_changed_by_us() -> None:
    done = subprocess.run([sys.executable, "-c", KEEP_TITLE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ray::rank-0 a run\nray::rank-1 a run\n", done.stderr


def test_a_process_that_is_no_submitted_job_has_no_metadata_to_add_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    add_job_metadata({"run_dir": "/runs/1"})


def test_private_names_are_used_nowhere_else() -> None:
    private = re.compile(r"ray\._private|ray\.core\.generated|ray\._raylet")
    users = [p for p in sorted(ROOT.glob("orchestrator/**/*.py")) if private.search(p.read_text())]
    assert users == [ROOT / "orchestrator" / "compat" / "ray" / "internals.py"]


def test_the_order_of_rows_leaves_no_variable_to_the_processes_that_start_later() -> None:
    code = """
import os
from orchestrator.compat.ray.datasets import in_order
before = dict(os.environ)
with in_order():
    import ray.data
assert ray.data.DataContext.get_current().use_datasource_v2 is False
assert dict(os.environ) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
