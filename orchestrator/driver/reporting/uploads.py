"""The driver's uploads of records and logs to the URL ``output_dir``."""

from __future__ import annotations

from orchestrator.config.redact import Redactor
from orchestrator.config.schema import StorageConfig
from orchestrator.records.lease import Lease
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.mirror import Mirror


class RecordUpload:
    """Uploads the files of a run directory while the run lasts; does nothing if ``output_dir`` is a directory.

    It uploads only as long as this process has the ``lease``.
    """

    def __init__(self, run_dir: RunDir, lease: Lease, config: StorageConfig, redactor: Redactor):
        self._run_dir = run_dir
        self._flush_timeout_s = config.flush_timeout_s
        self._mirror = None
        if run_dir.remote is not None:
            self._mirror = Mirror(
                run_dir.path,
                run_dir.remote,
                every_s=config.upload_every_s,
                masked=redactor.copy_file,
                admitted=lease.is_mine,
            )

    def problem(self) -> str | None:
        """Return why the last upload failed, None if it did not."""
        return None if self._mirror is None else self._mirror.problem()

    def finish(self) -> str | None:
        """Upload the rest, for at most ``storage.flush_timeout_s``.

        Returns:
            What is not uploaded and where it is; None if everything is.
        """
        if self._mirror is None or not (missing := self._mirror.finish(self._flush_timeout_s)):
            return None
        files = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        why = self._mirror.problem() or f"storage.flush_timeout_s={self._flush_timeout_s:g} was not enough"
        return f"not uploaded to {self._run_dir.location}: {files} ({why}); the files are in {self._run_dir.path}"
