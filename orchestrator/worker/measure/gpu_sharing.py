"""How much other processes use the GPU of a worker, as NVIDIA's management library (NVML) tells."""

from __future__ import annotations

import os
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from orchestrator.worker.measure.gpu_meter import Nvml, import_nvml


class GpuSharing:
    """Reads the GPU with the id ``uuid`` in threads, because a call to the driver may hang with a broken GPU."""

    def __init__(self, uuid: str, import_nvml: Callable[[], Nvml | None] = import_nvml):
        self._uuid = uuid
        self._import_nvml = import_nvml
        self._reader: threading.Thread | None = None
        self._handle: Any = None
        self._seen_at: int | None = None  # the driver's time of the newest sample
        self._found: float | None = None

    def others_pct(self) -> float | None:
        """Return the share of the time in which other processes used the GPU, and start the next reading.

        Returns:
            The share in percent between the last two calls; None if it is unknown: without the library, if the GPU does
            not count it, or if its process ids are not from this container.
        """
        if self._reader is not None and self._reader.is_alive():
            return None
        found, self._found = self._found, None
        self._reader = threading.Thread(target=self._read, name="gpu-sharing", daemon=True)
        self._reader.start()
        return found

    def _read(self) -> None:
        nvml = self._import_nvml()
        if nvml is None:
            return
        try:
            if self._handle is None:
                nvml.nvmlInit()
                self._handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_at or 0)
        except nvml.NVMLError:
            return
        is_first, self._seen_at = self._seen_at is None, max((s.timeStamp for s in samples), default=self._seen_at)
        by_process: defaultdict[int, list[int]] = defaultdict(list)
        for sample in samples:
            by_process[sample.pid].append(sample.smUtil)
        if os.getpid() in by_process and not is_first:  # the first samples are of the time before
            self._found = sum(statistics.fmean(used) for pid, used in by_process.items() if pid != os.getpid())
