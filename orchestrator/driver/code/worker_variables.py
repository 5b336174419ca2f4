"""The environment variables that the workers get from the driver, wherever Ray starts them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.build import ConfigError
from orchestrator.protocol.messages import Variables
from orchestrator.worker.process import network

FORWARDED_PREFIXES = (
    "FI_",
    "GLOO_",
    "HF_",
    "NCCL_",
    "OFI_NCCL_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "UCX_",
)
"""Variables of the driver with these prefixes need not be named in ``cluster.env``."""
OF_A_NODE = frozenset({network.GLOO})
"""Variables that each worker sets for its own node, where a value of the driver's may be wrong, unless it is named."""


def worker_variables(named: Mapping[str, str | None], own: Mapping[str, str]) -> Variables:
    """Return the variables for the workers.

    Args:
        named: ``cluster.env``: the value of each variable; None for the driver's own value.
        own: the environment of the driver.

    Raises:
        ConfigError: ``named`` has None for variables that are not in ``own``.
    """
    missing = [name for name, value in named.items() if value is None and name not in own]
    if missing:
        raise ConfigError(
            f"cluster.env.{name}=null: the variable {name} is not set in this process; export it, or give a value"
            for name in missing
        )
    return Variables(
        values={name: own[name] if value is None else value for name, value in named.items()},
        defaults={
            name: value for name, value in own.items() if name.startswith(FORWARDED_PREFIXES) and name not in OF_A_NODE
        },
    )
