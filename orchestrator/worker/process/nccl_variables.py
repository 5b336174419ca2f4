"""The environment variables that leave failures of NCCL to this project, instead of to torch's watchdog. Pure."""

from __future__ import annotations

from collections.abc import Mapping

FLIGHT_RECORDS = 1000
"""The number of operations that torch's flight recorder keeps on a rank: several steps of them."""
_ALWAYS = {
    # From torch 2.15, "nccl" would be another backend, nccl2. Runs can use it, but it is younger.
    "TORCH_DIST_USE_NCCL2": "0",
    # The watchdog would end the process of a rank that waits for a lost one.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # If the watchdog is the first to see an error, it asks all ranks to dump and then sleeps four times as long as the
    # dump may take, 60 s, while the destructor of the group waits for it. Our own call reads the flight recorder.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # A second thread would end a process whose watchdog is stuck in a call of CUDA.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The watchdog would end the process by SIGABRT before Python has raised an error of the device, which names it.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_TO_RECOVER = {
    # NVIDIA's own in-process restart requires it: memory of NVLink SHARP may not survive an aborted communicator.
    "NCCL_NVLS_ENABLE": "0",
}


def nccl_variables(own: Mapping[str, str], *, recovers: bool) -> dict[str, str]:
    """Return the variables to set before the first process group is formed; what the user has set stays.

    Args:
        own: the environment of this process.
        recovers: whether the process may have to form another group after a failure.
    """
    wanted = {**_ALWAYS, **(_TO_RECOVER if recovers else {}), **flight_variables(own)}
    return {name: value for name, value in wanted.items() if name not in own}


def flight_variables(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that switches torch's flight recorder on, unless the environment ``own`` gives its size."""
    names = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}  # the second is an older name
    return {} if names & own.keys() else {"TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDS)}
