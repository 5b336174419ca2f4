"""Several NCCL ranks on one GPU, for tests on a machine that has only one."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

DEVICE = "GPU_TESTS_DEVICE"
"""Environment variable: the GPU that all workers of a Ray share, by its number or UUID."""


def share_gpu(identity: str) -> None:
    """Let this process join NCCL groups with others on its GPU.

    NCCL refuses two ranks on one device of one host, and tells hosts apart by ``NCCL_HOSTID``. Ranks on different hosts
    communicate through sockets. To be called before the first process group.

    Args:
        identity: another one in each process.
    """
    os.environ |= {"NCCL_HOSTID": identity, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def share_gpu_as_worker() -> None:
    """Let this process, a worker of Ray that has not used CUDA yet, share the GPU ``DEVICE``."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[DEVICE]
    share_gpu(str(os.getpid()))


def variables_of_host(identity: str) -> dict[str, str]:
    """The environment of Ray and of our command on a host that shares the first GPU of this machine, if it has one."""
    from orchestrator.driver.gang.gang import SHARED_GPU

    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {"CUDA_VISIBLE_DEVICES": device, "NCCL_HOSTID": identity, "NCCL_IB_DISABLE": "1", SHARED_GPU: "1"}


@contextmanager
def shared_gpu_ray(num_gpus: int) -> Iterator[None]:
    """Run a Ray in this process that counts ``num_gpus`` GPUs, all of which are the first one of this machine.

    The runs of this process may then have several workers on one GPU.
    """
    import ray

    from orchestrator.driver.gang.gang import SHARED_GPU
    from orchestrator.protocol.messages import SHOW_ALL_GPUS

    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # so that the workers find this module
        SHOW_ALL_GPUS: "1",
        DEVICE: device,
        SHARED_GPU: "1",
    }
    with patch.dict(os.environ, variables):
        for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):  # Ray refuses to count more GPUs than the latter lists
            os.environ.pop(name, None)
        ray.init(
            address="local",
            num_cpus=num_gpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"worker_process_setup_hook": "helpers.machines.shared_gpu.share_gpu_as_worker"},
        )
        try:
            yield
        finally:
            ray.shutdown()
