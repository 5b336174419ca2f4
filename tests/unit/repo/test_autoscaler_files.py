"""The cluster files of ``ray up`` in ``cluster/autoscaler``, checked by Ray itself."""

from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from helpers.files.cluster_files import CLUSTER, check_ray_command, documents, ray_commands

FILES = sorted((CLUSTER / "autoscaler").glob("*.yaml"))


def prepared(path: Path) -> dict[str, Any]:
    (config,) = documents(path)
    complete: dict[str, Any] = prepare_config(config)
    validate_config(complete)
    return complete


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_ray_accepts_the_file(path: Path) -> None:
    config = prepared(path)
    assert config["provider"]["type"] == path.stem
    types = config["available_node_types"]
    assert config["head_node_type"] in types
    assert sum(t.get("min_workers", 0) for t in types.values()) == 0, "nodes are added on demand"
    assert max(t["max_workers"] for t in types.values()) > 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_ray_is_started_with_options_that_exist_and_with_a_token(path: Path) -> None:
    config = prepared(path)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for key, address in (("head_start_ray_commands", "--head"), ("worker_start_ray_commands", "--address=")):
        calls = [call for command in config[key] for call in ray_commands(command)]
        assert [name for name, _ in calls] == ["stop", "start"]
        for name, arguments in calls:
            check_ray_command(name, arguments)
        assert any(argument.startswith(address) for argument in calls[-1][1])
        assert "RAY_AUTH_MODE=token" in config[key][-1]
    assert any("--autoscaling-config=" in command for command in config["head_start_ray_commands"])


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_nodes_install_the_code_that_travels(path: Path) -> None:
    config = prepared(path)
    assert config["file_mounts"]["~/orchestrator"] == "."
    assert any(command.endswith("~/orchestrator") for command in config["setup_commands"])
