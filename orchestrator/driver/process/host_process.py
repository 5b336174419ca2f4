"""Keeps a run from changing the program that calls it, such as the kernel of a notebook.

What the import of a library does once, such as Ray's own loggers, stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

_running = threading.Lock()
_RAY_VARIABLES = ("RAY_", "PYTHONBREAKPOINT")
"""Ray sets such variables as it starts, and while a token is looked for."""


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """Let one thread at a time run something in this process.

    Raises:
        RuntimeError: another thread is inside, or this one.
    """
    if not _running.acquire(blocking=False):
        raise RuntimeError(
            "another orchestrator.run is in progress in this process; wait until it returns, or start this one in a "
            "process of its own"
        )
    try:
        yield
    finally:
        _running.release()


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Restore on exit what a run changes in this process.

    That is: Ray's environment variables and what Ray has read from them, ``sys.excepthook``, the warning filters, the
    states of the random generators of Python and torch, torch's default dtype, the working directory in ``sys.path``,
    and the stand-in for ``torch._dynamo``.
    """
    variables = _ray_variables(os.environ)
    excepthook, random_state = sys.excepthook, random.getstate()
    torch = sys.modules.get("torch")
    rng_state = None if torch is None else torch.get_rng_state()
    dtype = None if torch is None else torch.get_default_dtype()
    had_working_dir = (working_dir := str(Path.cwd())) in sys.path
    had_dynamo = "torch._dynamo" in sys.modules
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if (now := _ray_variables(os.environ)) != variables:
            for name in now.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
            if (ray := sys.modules.get("ray")) is not None and not ray.is_initialized():
                from orchestrator.compat.ray.connection import read_environment

                read_environment()
        sys.excepthook = excepthook
        random.setstate(random_state)
        if torch is not None:
            torch.set_rng_state(rng_state)
            torch.set_default_dtype(dtype)
        if not had_working_dir and working_dir in sys.path:
            sys.path.remove(working_dir)
        if not had_dynamo and "orchestrator.compat.deferred_dynamo" in sys.modules:
            from orchestrator.compat import deferred_dynamo

            deferred_dynamo.uninstall()


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Ray in this context: in a notebook, its import advises on displays that a run does not make."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.INFO))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")
            yield
    finally:
        logging.disable(disabled)


def _ray_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_RAY_VARIABLES)}
