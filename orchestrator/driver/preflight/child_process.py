"""A function in a child process, whose death is a sentence, because code of the job may end its process."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from orchestrator.compat import deferred_dynamo
from orchestrator.compat.ray import refused
from orchestrator.compat.torch import refused_in_fork
from orchestrator.config.operation import ClusterConfig
from orchestrator.driver.code.worker_code import pickled_with_code
from orchestrator.driver.process import cluster as ray_process
from orchestrator.records.lock import end_with_parent
from orchestrator.user_code.errors import exits_refused

T = TypeVar("T")
_NEW_PROCESS = """
import sys
sys.path[:] = sys.argv[4:]
from orchestrator.driver.preflight.child_process import serve_pickled
serve_pickled(*map(int, sys.argv[1:4]))
"""


class ChildDiedError(Exception):
    """The child has no result; the text is a clause that says why."""


class _NoBackwardError(Exception):
    """A backward pass was refused in a fork of this process, because this process has run one with a device."""


def in_child(function: Callable[[], T], *, timeout_s: float) -> T:
    """Return what ``function`` returns in a fork of this process.

    A fork has all that this process has loaded, so it costs milliseconds and needs no pickle of the job. It uses one
    thread: the other threads of this process do not exist in it. Those of autograd for a device do not either, without
    which torch refuses backward passes, as in a notebook with a GPU where one has run: if ``function`` tries one there,
    it runs again in a new process, which imports all anew.

    Args:
        function: returns plain data, and does not use Ray.
        timeout_s: the maximum wait for the result, ``recovery.build_max_s``.

    Raises:
        ChildDiedError: the child was killed, crashed, or did not return in time.
        NeedsFeederError: ``function`` has asked for samples that only a cluster can read.
        Exception: whatever ``function`` raises, with its traceback as a note.
    """
    try:
        found: T = _answer(lambda sender: _serve(function, sender), timeout_s)
    except _NoBackwardError:
        found = _answer(_as_new_process(function), timeout_s)
    return found


def beside_ray(function: Callable[[], T], *, cluster: ClusterConfig, timeout_s: float) -> T:
    """Return what ``function`` returns where Ray can be used: here, or in a new process with a Ray of its own.

    Args:
        function: returns plain data.
        cluster: how that Ray starts.
        timeout_s: the maximum wait for the result of a new process.

    Raises:
        ChildDiedError, Exception: as :func:`in_child`.
    """
    if ray_process.is_connected():
        return function()
    found: T = _answer(_as_new_process(functools.partial(_on_own_ray, function, cluster), uses_ray=True), timeout_s)
    return found


def _on_own_ray(function: Callable[[], T], cluster: ClusterConfig) -> T:
    cores = len(os.sched_getaffinity(0))
    with ray_process.embedded(cluster, num_cpus=cores, num_gpus=0, num_processes=1):
        return function()


def _answer(serve: Callable[[Connection], None], timeout_s: float) -> Any:
    """Return the result that ``serve`` sends from a fork, or raise the error."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=serve, args=(sender,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of the threads of this process
        child.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise ChildDiedError(f"took longer than recovery.build_max_s={timeout_s:g}")
        result, error = pickle.loads(receiver.recv_bytes())
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ChildDiedError(how) from None
    finally:
        child.kill()
        child.join()
        child.close()
        receiver.close()
    if error is not None:
        raise error
    return result


def _as_new_process(function: Callable[[], object], *, uses_ray: bool = False) -> Callable[[Connection], None]:
    """Return what turns a fork into a new process that serves ``function``."""
    try:
        data = pickled_with_code(function)
    except Exception as e:  # pickling calls code of any class that the job refers to
        raise ChildDiedError(f"cannot be sent what it needs: {type(e).__name__}: {e}") from e

    def serve(sender: Connection) -> None:
        pickled = os.memfd_create("function", 0)
        with os.fdopen(pickled, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(pickled, 0, os.SEEK_SET)
        os.set_inheritable(sender.fileno(), True)
        numbers = [str(pickled), str(sender.fileno()), str(int(uses_ray))]
        os.execv(sys.executable, [sys.executable, "-c", _NEW_PROCESS, *numbers, *sys.path])

    return serve


def serve_pickled(pickled: int, sender: int, uses_ray: int) -> None:
    """Serve the function that is pickled in one open file, and send what it returns to another."""
    with os.fdopen(pickled, "rb") as file:
        function: Callable[[], object] = pickle.load(file)
    _serve(function, Connection(sender, readable=False), uses_ray=bool(uses_ray))


def _serve(function: Callable[[], object], sender: Connection, *, uses_ray: bool = False) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    if not uses_ray:
        refused.refuse()
    deferred_dynamo.install()
    with refused_in_fork() as no_backward:
        try:
            with exits_refused():
                message = pickle.dumps((function(), None))
        except BaseException as e:
            e.add_note(f"in a child process: {traceback.format_exc()}")
            message = pickle.dumps((None, _with_its_text(e)))
    sender.send_bytes(pickle.dumps((None, _NoBackwardError())) if no_backward else message)


def _with_its_text(error: BaseException) -> BaseException:
    """Return the error, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
