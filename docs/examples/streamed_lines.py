"""Predict the next byte in lines of text that are streamed from files. They may be larger than memory.

python -m orchestrator.launch strategy=ddp job._target_=streamed_lines.Lines job.folder=/data/texts
"""

import itertools
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from orchestrator import Job

PADDING = -100


@dataclass(frozen=True, kw_only=True)
class Lines(Job):
    """``folder`` has text files, ``*.txt``; None: the sources of Python's library. One file in forty is held out.

    ``hugging_face`` reads them with the package ``datasets``.
    """

    folder: str | None = None
    hugging_face: bool = False
    length: int = 80  # bytes of a line that count
    width: int = 64
    lr: float = 3e-3

    def model(self):
        return NextByte(self.width)

    def dataset(self, split):
        paths = self.paths()
        held_out = paths[::40]
        paths = held_out if split == "val" else [path for path in paths if path not in held_out]
        return hugging_face_stream(paths) if self.hugging_face else LineStream(paths)

    @property
    def collate(self):
        return self.tokenized

    def tokenized(self, samples):
        """Turn lines into a batch. Each worker does this for its own share only, in loader processes if there are."""
        texts = [torch.tensor([10, *sample["text"].encode()[: self.length], 10]) for sample in samples]
        inputs, targets = torch.zeros(2, len(texts), self.length + 1, dtype=torch.int64)
        targets.fill_(PADDING)
        for i, text in enumerate(texts):
            inputs[i, : len(text) - 1], targets[i, : len(text) - 1] = text[:-1], text[1:]
        return inputs, targets

    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)

    def weight(self, target):
        return (target != PADDING).sum()

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.lr)

    def paths(self):
        if self.folder is None:
            return sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))
        return sorted(map(str, Path(self.folder).glob("*.txt")))

    def check(self):
        if len(self.paths()) < 2:
            raise ValueError(f"job.folder={self.folder}: needs at least 2 files *.txt, one of which is held out")


class LineStream(IterableDataset):
    """The lines of files that are not empty, as ``{"text": line}``, with the files in another order in each epoch."""

    def __init__(self, paths):
        self.paths, self.epoch = paths, 0
        self.at, self.begin_at = (0, 0), (0, 0)  # a file of the epoch's order, and lines read from it

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(self.paths, len(self.paths))
        (first, skipped), self.begin_at = self.begin_at, (0, 0)
        for number in range(first, len(order)):
            with Path(order[number]).open(errors="replace") as file:
                for count, line in enumerate(itertools.islice(file, skipped, None), skipped + 1):
                    if line.strip():
                        self.at = number, count
                        yield {"text": line.rstrip("\n")}
            skipped = 0

    def state_dict(self):
        return {"file": self.at[0], "lines": self.at[1]}

    def load_state_dict(self, state):
        self.begin_at = state["file"], state["lines"]


def hugging_face_stream(paths):
    """The same with ``datasets``. A buffer of 1 mixes the files; a larger one holds samples that a checkpoint lacks."""
    from datasets import load_dataset

    stream = load_dataset("text", data_files={"train": paths}, streaming=True, split="train")
    return stream.filter(lambda sample: sample["text"].strip() != "").shuffle(seed=0, buffer_size=1)


class NextByte(nn.Module):
    """Bytes of shape (batch, time) -> logits of shape (batch, time, 256)."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        states, _ = self.gru(self.embed(tokens))
        return self.head(states)
