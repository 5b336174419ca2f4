"""Examples for a language model in a file, a JSON object in each line or a text in each, read where they lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
"""The label of what the loss leaves out."""

Encode = Callable[[Mapping[str, Any]], tuple[list[int], list[int]]]
"""From an example to its tokens and its labels."""


class Examples(Dataset[dict[str, Tensor]]):
    """The examples of a file: ``input_ids``, ``attention_mask`` and ``labels``, without padding.

    Args:
        path: ``.jsonl``; or a text, with an example ``{"text": line}`` in each line that is not empty.
        encode: raises KeyError if an example lacks a field.
    """

    def __init__(self, path: Path, encode: Encode):
        self.path, self.encode = path, encode
        self.is_json = path.suffix == ".jsonl"
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        ends = np.flatnonzero(data == ord("\n")) + 1
        if not len(ends) or ends[-1] < len(data):
            ends = np.append(ends, len(data))
        starts = np.concatenate([[0], ends[:-1]])
        lengths = ends - starts - (data[ends - 1] == ord("\n")) if len(data) else ends
        self.numbers = np.flatnonzero(lengths)
        self.starts, self.ends = starts[self.numbers], ends[self.numbers]
        self.data = data

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"{self.path}, line {self.numbers[index] + 1}"
        try:
            line = bytes(self.data[self.starts[index] : self.ends[index]]).decode()
            example = json.loads(line) if self.is_json else {"text": line.rstrip("\r\n")}
            tokens, labels = self.encode(example)
        except KeyError as e:
            raise ValueError(f"{where}: has no field {e}") from None
        except Exception as e:  # of any type: the chat template of a tokenizer is code, too
            raise ValueError(f"{where}: {e}") from e
        return {
            "input_ids": torch.tensor(tokens),
            "attention_mask": torch.ones(len(tokens), dtype=torch.long),
            "labels": torch.tensor(labels),
        }


class Padded:
    """Joins examples to a batch: padded to ``length``, or to the longest of them if that is None."""

    def __init__(self, *, token: int, length: int | None):
        self.values = {"input_ids": token, "attention_mask": 0, "labels": IGNORED}
        self.length = length

    def __call__(self, examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: torch.stack(list(self._of_one_length([example[name] for example in examples], value)))
            if examples[0][name].ndim
            else torch.stack([example[name] for example in examples])
            for name, value in self.values.items()
        }

    def _of_one_length(self, tensors: Sequence[Tensor], value: int) -> Iterator[Tensor]:
        length = self.length or max(map(len, tensors))
        for tensor in tensors:
            yield torch.nn.functional.pad(tensor, (0, length - len(tensor)), value=value)
