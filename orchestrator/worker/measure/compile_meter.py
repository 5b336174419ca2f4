"""What ``torch.compile`` costs a rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from orchestrator.compat.torch import watching_compilation
from orchestrator.protocol.metrics import Metric, MetricSpec, measured
from orchestrator.worker.control.control import Outbox

COMPILE_S = MetricSpec(name="perf/compile_s", reduce="max")
RECOMPILES = MetricSpec(name="perf/recompiles", reduce="max")


class CompileMeter:
    """Measures how long torch compiles the model. Meanwhile the rank is in the phase ``compile``, which may take long.

    Attributes:
        seconds: the time so far.
        recompiles: how often code was compiled again, for other inputs or in another mode.
    """

    def __init__(self, outbox: Outbox, *, enabled: bool):
        """``enabled``: whether the model is compiled; otherwise nothing is imported for it."""
        self.seconds = 0.0
        self.recompiles = 0
        self._outbox = outbox
        self._enabled = enabled
        self._began = 0.0
        self._phase = contextlib.ExitStack()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure what is compiled in this block."""
        with watching_compilation(self._begin, self._end) if self._enabled else contextlib.nullcontext():
            yield

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics of a logged point; empty if the model is not compiled."""
        return measured({COMPILE_S: self.seconds, RECOMPILES: self.recompiles}) if self._enabled else {}

    def _begin(self, again: bool) -> None:
        self._began = time.perf_counter()
        self.recompiles += again
        self._phase.enter_context(self._outbox.within("compile"))

    def _end(self) -> None:
        self._phase.close()
        self._outbox.progress()
        self.seconds += time.perf_counter() - self._began
