"""Steps the wall clock of a Python process by the seconds that the file ``$CLOCK_OFFSET_FILE`` holds, at any moment.

Python imports this module whenever it starts with this folder on its path. Neither the monotonic clock nor the clock
that stamps files is stepped, and processes of Ray that are not in Python keep their time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_offset_file = Path(os.environ["CLOCK_OFFSET_FILE"])
_time, _time_ns = time.time, time.time_ns


def _offset_s() -> int:
    return int(_offset_file.read_text())


time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + _offset_s() * 10**9
