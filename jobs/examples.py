"""Examples for a language model in files, and how they become tokens, labels and batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from jobs.chats import assistant_tokens, chat_parts
from jobs.rows import Rows
from jobs.tokens import IGNORED, Source

Encode = Callable[[Mapping[str, Any]], dict[str, Tensor]]
"""From an example to its tensors, which have no batch dimension."""


class Examples(Dataset[dict[str, Tensor]]):
    """The encoded examples of a file: ``input_ids``, ``attention_mask`` and ``labels``, each of shape (tokens,).

    Those of a pair of answers are of shape (2, tokens), and the shorter one is padded.

    Args:
        rows: the examples as they are stored.
        encode: raises KeyError if an example lacks a field.
        left_out: the rows to leave out, in order.
    """

    def __init__(self, rows: Rows, encode: Encode, *, left_out: Sequence[int] = ()):
        self.rows, self.encode, self.left_out = rows, encode, left_out
        self.kept = np.delete(np.arange(len(rows)), left_out)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = int(self.kept[index])
        try:
            return self.encode(self.rows.row(row))
        except KeyError as e:
            raise ValueError(f"{self.rows.name(row)}: has no field {e}") from None
        except Exception as e:  # of any type: the chat template of a tokenizer is code, too
            raise ValueError(f"{self.rows.name(row)}: {e}") from e


class Blocks(Dataset[dict[str, Tensor]]):
    """The tokens of a file in blocks of ``size``, whatever documents they are of. The last ones may fill none."""

    def __init__(self, source: Source, size: int):
        self.source, self.size = source, size

    def __len__(self) -> int:
        return len(self.source.tokens) // self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = torch.from_numpy(self.source.tokens[index * self.size :][: self.size].astype(np.int64))
        return _example(tokens, tokens.clone())


def _example(tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens, "attention_mask": torch.ones(len(tokens), dtype=torch.long), "labels": labels}


SEGMENTS = "token_type_ids"
"""The key under which an example has the number of the text that each token is of."""
POSITIONS = "position_ids"
"""The key under which packed examples have the place of each token in its own example."""


class Padded:
    """Joins examples to a batch: padded to ``length``, or to the longest of them if that is None.

    Padding comes after a text, or before it with ``before``.
    """

    def __init__(self, *, token: int, length: int | None, before: bool = False):
        self.values = {"input_ids": token, "attention_mask": 0, SEGMENTS: 0, POSITIONS: 0, "labels": IGNORED}
        self.length, self.before = length, before

    def __call__(self, examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: torch.stack(list(self._of_one_length([example[name] for example in examples], value)))
            if examples[0][name].ndim
            else torch.stack([example[name] for example in examples])
            for name, value in self.values.items()
            if name in examples[0]
        }

    def _of_one_length(self, tensors: Sequence[Tensor], value: int) -> Iterator[Tensor]:
        length = self.length or max(tensor.shape[-1] for tensor in tensors)
        for tensor in tensors:
            missing = length - tensor.shape[-1]
            yield torch.nn.functional.pad(tensor, (missing, 0) if self.before else (0, missing), value=value)


def answered(example: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an example of ``job.task=dpo`` as one of ``causal`` with its answer ``chosen`` or ``rejected``.

    Raises:
        KeyError: a field is missing.
        ValueError: an answer is empty, or the fields do not go together.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    if not (chosen and rejected):
        raise ValueError(f"{'rejected' if chosen else 'chosen'} is empty")
    if len({isinstance(field, str) for field in (example.get("prompt", chosen), chosen, rejected)}) > 1:
        raise ValueError("prompt, chosen and rejected have to be all texts, or all lists of messages")
    if isinstance(chosen, str):
        return {"prompt": example["prompt"], "completion": example[name]}
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected differ before their last messages; only these may differ")
    return {**example, "messages": [*example.get("prompt", ()), *example[name]]}


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """From an example to its tensors, cut to ``block_size``; the fields are those of ``job=hf``."""

    tokenizer: Any
    task: str
    block_size: int
    num_labels: int
    mlm_probability: float
    assistant_only_loss: bool = False

    def __call__(self, example: Mapping[str, Any]) -> dict[str, Tensor]:
        if self.task == "dpo":
            pair = [self._encoded(answered(example, name)) for name in ("chosen", "rejected")]
            return Padded(token=0, length=None)(pair)
        return self._encoded(example)

    def _encoded(self, example: Mapping[str, Any]) -> dict[str, Tensor]:
        size = self.block_size
        if self.task in ("causal", "dpo"):
            tokens, learned = self._tokens_and_learned(example)
            labels = [token if counts else IGNORED for token, counts in zip(tokens, learned, strict=True)]
            return _example(torch.tensor(tokens[:size]), torch.tensor(labels[:size]))
        cut = {"truncation": True, "max_length": size}  # keeps what a tokenizer writes at the end, such as [SEP]
        if self.task == "seq2seq":
            tokens = self.tokenizer(example["prompt"], **cut)["input_ids"]
            labels = self.tokenizer(text_target=example["completion"], **cut)["input_ids"]
            return _example(torch.tensor(tokens), torch.tensor(labels))
        if self.task == "classification":
            found = self.tokenizer(example["text"], example.get("text_pair"), **cut)
            made = _example(torch.tensor(found["input_ids"]), torch.tensor(self._label(example["label"])))
        else:
            found = self.tokenizer(example["text"], **cut)
            made = _example(*map(torch.tensor, self._masked(found["input_ids"])))
        return {**made, SEGMENTS: torch.tensor(found[SEGMENTS])} if SEGMENTS in found else made

    def _label(self, given: Any) -> int:
        label = int(given)
        if label != float(given):
            raise ValueError(f"label {given} is no whole number")
        if not 0 <= label < self.num_labels:
            raise ValueError(f"label {label} is not in 0 to {self.num_labels - 1}; set job.num_labels")
        return label

    def _tokens_and_learned(self, example: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """Return the tokens of an example, and which of them are learned."""
        if self.assistant_only_loss and "messages" in example and self.tokenizer.chat_template:
            return assistant_tokens(self.tokenizer, example)
        tokens, first = self._tokens_and_answer(example)
        return tokens, [place >= first for place in range(len(tokens))]

    def _tokens_and_answer(self, example: Mapping[str, Any]) -> tuple[list[int], int]:
        """Return the tokens of an example, and the number of the first one that is learned."""
        if "messages" in example:
            if not self.tokenizer.chat_template:
                raise ValueError("messages need a chat template, and the tokenizer has none; use prompt and completion")
            prompt, answer = chat_parts(self.tokenizer, example)
            return self._divided(prompt, answer, add_special_tokens=False)
        if "prompt" in example:
            tokens, first = self._divided(example["prompt"], example["completion"])
            tokens = self._ended(tokens)
            return tokens, min(first, len(tokens) - 1)
        return self._ended(self.tokenizer(example["text"])["input_ids"]), 0

    def _divided(self, prompt: str, answer: str, **options: bool) -> tuple[list[int], int]:
        """Return the tokens of both as one text, because some tokenizers begin each with a space; and where it is cut.

        That is where the tokens are no longer those of the prompt alone, as ``trl`` divides them.
        """
        before: list[int] = self.tokenizer(prompt, **options)["input_ids"]
        tokens: list[int] = self.tokenizer(prompt + answer, **options)["input_ids"]
        return tokens, len(os.path.commonprefix([before, tokens]))  # noqa: RUF071 - of tokens

    def _ended(self, tokens: list[int]) -> list[int]:
        """Return tokens with one end, which some tokenizers write after each text and some texts have."""
        end = self.tokenizer.eos_token_id
        while len(tokens) > 1 and tokens[-1] == tokens[-2] == end:
            tokens = tokens[:-1]
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]

    def _masked(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Hide some tokens, the same ones each time the example is read (Devlin et al., 2019)."""
        if self.tokenizer.mask_token_id is None:
            raise ValueError("job.task=masked: the tokenizer has no mask token; use job.task=causal")
        special = torch.tensor(self.tokenizer.get_special_tokens_mask(tokens, already_has_special_tokens=True)).bool()
        generator = torch.Generator().manual_seed(hash(tuple(tokens)))
        draw, kind = torch.rand(2, len(tokens), generator=generator)
        others = torch.randint(len(self.tokenizer), (len(tokens),), generator=generator)
        chosen = (draw < self.mlm_probability) & ~special
        ids = torch.tensor(tokens)
        hidden = torch.where(kind < 0.8, self.tokenizer.mask_token_id, torch.where(kind < 0.9, others, ids))
        return torch.where(chosen, hidden, ids).tolist(), torch.where(chosen, ids, IGNORED).tolist()
