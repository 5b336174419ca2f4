"""The internals of Hydra that this project touches, written against Hydra 1.3.8."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase

CHECKED_VERSION = "1.3.8"

_SINGLETONS: tuple[type, ...] = (GlobalHydra, JobRuntime, VersionBase)
"""What ``initialize_config_dir`` and the parser of overrides change for the whole process."""


@contextlib.contextmanager
def own_hydra() -> Iterator[None]:
    """Use Hydra in this context, or function, without a trace in a program that uses Hydra itself."""
    instances = Singleton._instances
    callers = {cls: instances.pop(cls) for cls in _SINGLETONS if cls in instances}
    try:
        yield
    finally:
        for cls in _SINGLETONS:
            instances.pop(cls, None)
        instances.update(callers)
