"""Histograms of the parameters and of their gradients, over all ranks: as numbers, and as a picture.

A bin is a power of two, with the sign. All histograms have the same bins, so that those of a tensor's shards add up.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestrator.protocol.events import SampleSaved
from orchestrator.records.json_file import write_atomically
from orchestrator.records.run_dir import RunDir
from orchestrator.state.transport import gather_json
from orchestrator.worker.control.control import Outbox, Warner

LOWEST, HIGHEST = -32, 8
"""A bin is [2^e, 2^(e+1)), for each e from the first to the last of these, which also have what lies beyond."""
_BINS = HIGHEST - LOWEST + 1
ZERO, NOT_FINITE, NUM_COUNTS = _BINS, 2 * _BINS + 1, 2 * _BINS + 2
"""Counts are in the order of the values: negative, zero, positive, and in the end what is not finite."""
_NAME = "histograms"
_KINDS = ("parameters", "gradients")
_AT_ONCE = 2**20
"""Entries that are counted at the same time, because it takes some 30 bytes for each."""

Counts = Mapping[str, Sequence[int]]
"""The counts of each tensor, by its name."""


def counts_of(tensor: Tensor) -> Tensor:
    """Return how many entries of ``tensor`` are in each bin, as integers of shape (NUM_COUNTS,) on its device."""
    values = tensor.detach()
    if values.is_sparse:
        stored = values.coalesce().values()
        counts = counts_of(stored)
        counts[ZERO] += values.numel() - stored.numel()
        return counts
    if values.is_complex():
        values = torch.view_as_real(values)
    counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=values.device)
    for piece in values.reshape(-1).split(_AT_ONCE):
        numbers = piece.float() if piece.dtype.itemsize < 4 else piece
        exponent = torch.frexp(numbers).exponent - 1
        from_zero = exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1
        place = torch.where(numbers == 0, ZERO, ZERO + torch.where(numbers < 0, -from_zero, from_zero))
        counts += torch.bincount(torch.where(numbers.isfinite(), place, NOT_FINITE), minlength=NUM_COUNTS)
    return counts


def added(parts: Iterable[Counts]) -> dict[str, list[int]]:
    """Return the sum of the counts of each name."""
    sums: dict[str, list[int]] = {}
    for part in parts:
        for name, counts in part.items():
            before = sums.get(name, [0] * NUM_COUNTS)
            sums[name] = [a + b for a, b in zip(before, counts, strict=True)]
    return sums


class Histograms:
    """Counts on this rank what it has of the model, and writes the sums over all ranks into the run directory."""

    def __init__(self, run_dir: RunDir, *, outbox: Outbox, warner: Warner, device: torch.device):
        self._run_dir = run_dir
        self._outbox = outbox
        self._warner = warner
        self._device = device
        self._counts: dict[str, Counts] = {}

    def observe(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Count ``parameters`` and their gradients, before the update."""
        own: Mapping[str, Tensor] = dict(parameters)
        gradients = {name: p.grad for name, p in own.items() if p.grad is not None}
        self._counts = {kind: _counted(each) for kind, each in zip(_KINDS, (own, gradients), strict=True)}

    def save(self, *, step: int, rank: int, world_size: int) -> None:
        """Write what the ranks have observed in ``step``, on rank 0. A collective operation.

        A file that cannot be written is a warning.
        """
        ranks = gather_json(self._counts, world_size=world_size, device=self._device)
        if rank != 0:
            return
        try:
            self._write(step, {kind: added(counts[kind] for counts in ranks) for kind in _KINDS})
        except OSError as e:
            self._warner.warn(f"the histograms of step {step} cannot be written: {e}", topic=_NAME)

    def _write(self, step: int, sums: Mapping[str, Counts]) -> None:
        record = {"step": step, "lowest_exponent": LOWEST, "highest_exponent": HIGHEST, **sums}
        self._run_dir.samples.mkdir(exist_ok=True)
        for suffix, data in (("json", json.dumps(record).encode()), ("png", drawn(sums))):
            path = self._run_dir.sample_file(step, _NAME, suffix)
            write_atomically(path, data)
            name = _NAME if suffix == "png" else f"{_NAME}.{suffix}"
            self._outbox.put_event(SampleSaved(step=step, name=name, path=str(path.relative_to(self._run_dir.path))))


def _counted(tensors: Mapping[str, Tensor]) -> Counts:
    """Return the counts of each tensor, after one copy from the device of the first; others may be elsewhere."""
    counts = [counts_of(tensor) for tensor in tensors.values()]
    together = torch.stack([c.to(counts[0].device) for c in counts]).tolist() if counts else []
    return dict(zip(tensors, together, strict=True))


# The picture --------------------------------------------------------------------------------------

_MOST_ROWS = 64
_CELL = (5, 14)  # pixels
_LABEL_CHARACTERS = 44
_TICKS_EVERY = 8  # powers of two
_WHITE, _BLUE = (255, 255, 255), (0, 69, 120)
_RED = (200, 30, 30)


def rows_of(names: Collection[str]) -> dict[str, str]:
    """Return the row of each tensor: its own, or if these are too many that of a module, as deep as there is room."""
    depth = max((name.count(".") + 1 for name in names), default=1)
    rows = {name: name for name in names}
    while len(set(rows.values())) > _MOST_ROWS and depth > 1:
        depth -= 1
        rows = {name: ".".join(name.split(".")[:depth]) for name in names}
    return rows


def drawn(sums: Mapping[str, Counts]) -> bytes:
    """Return a PNG: for each kind a panel with a row per tensor or module; the darker a bin, the more entries it has.

    A red mark at the end of a row: some entries are not finite.
    """
    from PIL import Image, ImageDraw

    width, height = _CELL
    left, top = 7 * _LABEL_CHARACTERS, 2 * height
    panel = (2 * _BINS + 2) * width
    rows = rows_of(list(dict.fromkeys(name for counts in sums.values() for name in counts)))
    names = list(dict.fromkeys(rows.values()))
    tables = {kind: added({rows[name]: each} for name, each in counts.items()) for kind, counts in sums.items()}
    image = Image.new("RGB", (left + len(tables) * (panel + 4 * width), top + (len(names) + 2) * height), _WHITE)
    draw = ImageDraw.Draw(image)
    for row, name in enumerate(names):
        label = name if len(name) <= _LABEL_CHARACTERS else "..." + name[3 - _LABEL_CHARACTERS :]
        draw.text((4, top + row * height), label, fill="black")
    for number, (kind, table) in enumerate(tables.items()):
        begin = left + number * (panel + 4 * width)
        draw.text((begin, 4), f"{kind}, signed powers of two", fill="black")
        exponents = range(LOWEST + _TICKS_EVERY, HIGHEST + 1, _TICKS_EVERY)
        ticks = {ZERO: "0"} | {ZERO + sign * (e - LOWEST + 1): f"{sign * 2}^{e}" for e in exponents for sign in (-1, 1)}
        for place, label in ticks.items():
            draw.text((begin + place * width, top + len(names) * height + 4), label, fill="black", anchor="ma")
        for row, name in enumerate(names):
            counts = table.get(name, ())
            most = max(counts, default=0)
            for place, count in enumerate(counts):
                if count:
                    colour = _RED if place == NOT_FINITE else _shade(math.log1p(count) / math.log1p(most))
                    x, y = begin + place * width, top + row * height
                    draw.rectangle((x, y, x + width - 1, y + height - 3), fill=colour)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _shade(share: float) -> tuple[int, ...]:
    return tuple(round(white + (blue - white) * share) for white, blue in zip(_WHITE, _BLUE, strict=True))
