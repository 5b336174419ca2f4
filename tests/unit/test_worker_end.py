"""How a worker leaves a generation: whatever breaks then does not hide what the worker reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.worker.actor import _leave, _recoverable_steps


def breaks(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the connection is gone")


def test_errors_at_the_end_are_only_printed(capfd: pytest.CaptureFixture[str]) -> None:
    loop: Any = SimpleNamespace(strategy=SimpleNamespace(close=breaks), recoverable_steps=breaks)
    _leave(loop)
    assert _recoverable_steps(loop) == {}
    assert capfd.readouterr().err.count("RuntimeError: the connection is gone") == 2


def test_a_worker_that_has_built_no_loop_leaves_too() -> None:
    _leave(None)
    assert _recoverable_steps(None) == {}
