"""An LSTM that learns to spell names: those in Python's standard library, or in a file with one name per line.

    python -m orchestrator.launch job=names strategy=ddp job.path=towns.txt

Names differ in length, so the loss is a mean over bytes, and batches are packed so that padding costs no computation.
An example of :meth:`~orchestrator.job.Job.weight` and :meth:`~orchestrator.job.Job.collate`.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset

from orchestrator.job import Job, Split

BYTES = 256
NEWLINE = ord("\n")  # begins and ends each name
IGNORED = -100  # the target of padding, which the loss leaves out
VAL_PERCENT = 10

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Names(Job):
    """A character-level LSTM. After an evaluation and at the end, it makes up names.

    Attributes:
        path: a text file; None for the names of the functions and classes in Python's standard library.
        sample_names: how many names the model makes up.
        sample_bytes: the most bytes that a made-up name has.
    """

    layers: int = 1
    width: int = 64
    lr: float = 1e-2
    path: str | None = None
    sample_names: int = 10
    sample_bytes: int = 40
    temperature: float = 0.8

    def model(self) -> nn.Module:
        return Speller(width=self.width, layers=self.layers)

    def dataset(self, split: Split) -> Dataset[Sample]:
        names = self.names()
        # The split does not depend on the run's seed, so that runs with different seeds can be compared.
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
        held_out = len(names) * VAL_PERCENT // 100
        return Spellings([names[i] for i in (order[:held_out] if split == "val" else order[held_out:])])

    @property
    def collate(self) -> Callable[[list[Sample]], Any]:
        return pad

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    def weight(self, target: Tensor) -> Tensor:
        return (target != IGNORED).sum()

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr)

    def sample(self, model: nn.Module, generator: torch.Generator) -> str:
        """Generate ``sample_names`` names, one per line, drawn byte by byte with the model's probabilities."""
        device = next(model.parameters()).device
        text = torch.full((self.sample_names, 1), NEWLINE, device=device)
        for length in range(1, self.sample_bytes + 1):
            logits = model((text, torch.full((len(text),), length)))[:, -1].float() / self.temperature
            drawn = torch.multinomial(logits.softmax(dim=-1).to(generator.device), 1, generator=generator)
            text = torch.cat([text, drawn.to(device)], dim=1)
        spelt = (bytes(row).partition(b"\n")[0].decode(errors="replace") for row in text[:, 1:].tolist())
        return "\n".join(spelt)

    def names(self) -> list[bytes]:
        """Read the names to train on, without duplicates.

        Raises:
            ValueError: ``path`` cannot be read, or Python's sources are not installed.
        """
        if self.path is None:
            library = Path(sysconfig.get_path("stdlib")).glob("*.py")
            defined = re.compile(rb"^\s*(?:def|class)\s+(\w+)", re.MULTILINE)
            names = {name for file in library for name in defined.findall(file.read_bytes())}
            if not names:
                raise ValueError(
                    "job.path=null: the sources of Python's library are not installed; set it to a text file"
                )
            return sorted(names)
        try:
            text = Path(self.path).expanduser().read_bytes()
        except OSError as e:
            raise ValueError(f"job.path={self.path}: cannot be read ({e.strerror}); set it to a text file") from e
        return sorted({line.strip() for line in text.splitlines()} - {b""})

    def check(self) -> None:
        for name in ("layers", "width", "sample_names", "sample_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least 1")
        for name in ("lr", "temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"job.{name}={getattr(self, name):g}: must be greater than 0")
        found, least = len(self.names()), 100 // VAL_PERCENT
        if found < least:
            raise ValueError(
                f"job.path={self.path or 'null'}: has {found} names, but at least {least} are needed; use a longer file"
            )


class Spellings(Dataset[Sample]):
    """Items ``(input, target)``, both int64 of shape (length of the name + 1,). The target is one byte ahead."""

    def __init__(self, names: list[bytes]):
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        text = torch.tensor([NEWLINE, *self.names[index], NEWLINE])
        return text[:-1], text[1:]


def pad(samples: list[Sample]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Join samples to a batch ``((inputs, lengths), targets)``.

    The shapes are (batch, longest), (batch,) and (batch, longest).
    """
    inputs, targets = [text for text, _ in samples], [target for _, target in samples]
    lengths = torch.tensor([len(text) for text in inputs])
    return (
        (pad_sequence(inputs, batch_first=True, padding_value=NEWLINE), lengths),
        pad_sequence(targets, batch_first=True, padding_value=IGNORED),
    )


class Speller(nn.Module):
    """Predicts the next byte: texts of shape (batch, time) and their lengths -> logits of shape (batch, time, 256)."""

    def __init__(self, *, width: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, BYTES)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        texts, lengths = batch
        packed = pack_padded_sequence(self.embed(texts), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=texts.shape[1])
        logits: Tensor = self.head(states)
        return logits
