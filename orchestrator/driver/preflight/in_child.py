"""Code and checks of the job's model in a child process, because what it does to fake tensors can end its process."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from orchestrator.compat import deferred_dynamo
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.planning.plan import Plan
from orchestrator.records.process import end_with_parent
from orchestrator.strategies.rules import Rules
from orchestrator.user_code.exits import exits_refused

T = TypeVar("T")


class ChildDiedError(Exception):
    """The child has no result; the text is a clause that says why."""


def in_child(function: Callable[[], T], *, timeout_s: float) -> T:
    """Return what ``function`` returns in a fork of this process.

    A fork has all that this process has loaded, so it costs milliseconds and needs no pickle of the job. It uses one
    thread: the other threads of this process do not exist in it.

    Args:
        function: returns plain data, and does not use Ray.
        timeout_s: the maximum wait for the result, ``recovery.build_max_s``.

    Raises:
        ChildDiedError: the child was killed, crashed, or did not return in time.
        Exception: whatever ``function`` raises, with its traceback as a note.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(function, sender))
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
    value: T = result
    return value


def _serve(function: Callable[[], object], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    deferred_dynamo.install()
    try:
        with exits_refused():
            message = pickle.dumps((function(), None))
    except BaseException as e:
        e.add_note(f"in a child process: {traceback.format_exc()}")
        message = pickle.dumps((None, _with_its_text(e)))
    sender.send_bytes(message)


def _with_its_text(error: BaseException) -> BaseException:
    """Return the error, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def check_job(rules: type[Rules[Any]], config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check in a child process whether ``job`` can be trained by ``plan``; arguments and result as ``rules.check``.

    If the child dies, this is an error where the workers would build the model in the same way, and else a note.
    """

    def check() -> tuple[tuple[str, ...], list[str]]:
        found: list[str] = []
        return rules.check(config, job, plan, found), found

    try:
        notes, found = in_child(check, timeout_s=config.recovery.build_max_s)
    except ChildDiedError as e:
        what = f"a process that built the job's model without memory, to check it, {e}"
        if plan.pipeline is None:
            return (f"{what}: nothing is known about the model",)
        errors.append(
            f"strategy={config.strategy.name}: {what}; the workers would build it in the same way to cut it into "
            "stages: use strategy=ddp, or find the cause in the code of the model"
        )
        return ()
    errors += found
    return notes
