"""What is said if the cluster has other versions than the driver."""

import platform

import pytest
import ray

from orchestrator.compat.ray.internals import find_internal
from orchestrator.driver.process.cluster import version_error

CHECK = "ray._private.utils.check_version_info"


@pytest.mark.parametrize("there", [{"ray_version": "2.50.1"}, {"python_version": "3.10.2"}])
def test_an_error_of_ray_about_versions_becomes_one_line(there: dict[str, str]) -> None:
    cluster = {"ray_version": ray.__version__, "python_version": platform.python_version(), **there}
    with pytest.raises(RuntimeError) as raised:
        find_internal(CHECK)(cluster, "node 10.0.0.1")
    said = version_error(str(raised.value))
    assert said.startswith(
        f"the cluster has Ray {cluster['ray_version']} and Python {cluster['python_version']}, this "
    )
    assert f"this process Ray {ray.__version__} and Python {platform.python_version()}; use" in said


def test_another_error_is_not_about_versions() -> None:
    assert version_error("Failed to connect to Ray: timed out") is None
