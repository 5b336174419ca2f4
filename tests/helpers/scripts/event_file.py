"""Writes scalars to an event file, as libraries for TensorBoard do: losses by step, and an accuracy by epoch."""

import os
import struct
import sys
import time
from pathlib import Path


def record(step: int, tag: str, value: float) -> bytes:
    scalar = bytes([10, len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)
    summary = bytes([10, len(scalar)]) + scalar
    data = b"\x09" + struct.pack("<d", time.time()) + bytes([16, step, 42, len(summary)]) + summary
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


folder = Path(sys.argv[1], os.environ["RANK"])
folder.mkdir(parents=True)
for epoch, loss in ((1, 2.0), (2, 1.0)):
    with open(os.fsencode(folder / "events.out.tfevents.1"), "ab") as file:  # noqa: PTH123, as torch's writer does
        file.write(record(20 * epoch, "train/loss", loss))
        file.write(record(epoch, "val/acc", epoch / 4))
