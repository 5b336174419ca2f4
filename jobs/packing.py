"""Several examples in one sample, none of which sees another: fewer samples, without padding."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from jobs.examples import POSITIONS, Encode, Examples
from jobs.hugging_face import first_sentence
from jobs.rows import Rows
from jobs.tokens import IGNORED

Example = dict[str, Tensor]
_LARGEST = 2**26
"""The parameters up to which a model itself is tried."""
_LAYERS, _WORDS = 4, 256
"""The most layers of the model that is tried in place of a larger one, and the most words and widths of its MLPs."""
_LENGTHS = (7, 5, 9)
"""The tokens of the examples that are tried."""
_SHARE = 1e-5
"""The most that the results of packed examples may differ, of what they differ where each sees those before it."""


class Packed(Dataset[Example]):
    """The ``examples`` of each of the ``packs``, one after another."""

    def __init__(self, examples: Any, packs: Sequence[Sequence[int]]):
        self.examples, self.packs = examples, packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Example:
        return joined([self.examples[number] for number in self.packs[index]])


def packed(examples: Any, size: int) -> Packed:
    """Return ``examples`` in samples of at most ``size`` tokens. All are encoded once, for their lengths."""
    return Packed(examples, best_fit(lengths(examples), size))


def lengths(examples: Any) -> Sequence[int]:
    """Return the number of tokens of each example."""
    if isinstance(examples, Subset):
        each = lengths(examples.dataset)
        return [each[number] for number in examples.indices]
    return _lengths(examples.rows, examples.encode, tuple(examples.left_out))


@functools.lru_cache(maxsize=4)
def _lengths(rows: Rows, encode: Encode, left_out: Sequence[int]) -> Sequence[int]:
    """Return what :func:`lengths` does of all examples of a file, once for each process."""
    examples = Examples(rows, encode, left_out=left_out)
    return [len(examples[number]["input_ids"]) for number in range(len(examples))]


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return the numbers of the examples in each sample: the largest first, each where it leaves least room."""
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)  # samples by the room that they have left
    rooms = 0  # bit n: whether a sample has room for n
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        if fitting := rooms >> size:
            left = size + (fitting & -fitting).bit_length() - 1
            pack = with_room[left].pop()
            if not with_room[left]:
                rooms &= ~(1 << left)
            packs[pack].append(number)
        else:
            left, pack = room, len(packs)
            packs.append([number])
        with_room[left - size].append(pack)
        rooms |= 1 << (left - size)
    return packs


def joined(examples: Sequence[Example]) -> Example:
    """Return one sample of several examples. Nothing predicts the first token of each."""
    labels = [torch.cat([torch.tensor([IGNORED]), example["labels"][1:]]) for example in examples]
    return {
        "input_ids": torch.cat([example["input_ids"] for example in examples]),
        "attention_mask": torch.cat([example["attention_mask"] for example in examples]),
        POSITIONS: torch.cat([torch.arange(len(example["input_ids"])) for example in examples]),
        "labels": torch.cat(labels),
    }


def refusal(config: Any, parameters: int) -> str | None:
    """Return why a model with so many ``parameters`` cannot train on packed examples; None if it can.

    It is tried with random weights, and if it is large, with fewer layers and words: packed examples have the results
    of separate ones. The comparison shows something only if other results come out where examples see each other.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    tried = config if parameters <= _LARGEST else smaller(config)
    words = min(_WORDS, tried.get_text_config().vocab_size)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = auto.from_config(tried, dtype=torch.float64, experts_implementation="eager").eval()
            examples = [torch.randint(words, (1, length)) for length in _LENGTHS]
            tokens, places = torch.cat(examples, dim=1), [torch.arange(length) for length in _LENGTHS]
            separate = torch.cat([model(input_ids=each, use_cache=False).logits for each in examples], dim=1)

            def difference(positions: Tensor) -> float:
                made = model(input_ids=tokens, position_ids=positions[None], use_cache=False).logits
                return float((made - separate).abs().max())

            found, seen = difference(torch.cat(places)), difference(torch.arange(tokens.shape[1]))
    except Exception as e:  # whatever the code of the model raises
        return f"packed examples cannot be tried: {first_sentence(e)}"
    return None if found <= _SHARE * seen else "it lets an example see those before it in a sample"


def smaller(config: Any) -> Any:
    """Return a configuration with few layers and words, and otherwise as ``config``."""
    made = copy.deepcopy(config)
    text = made.get_text_config()
    layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):  # such as the kinds of the layers
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:_LAYERS])
    text.num_hidden_layers = min(layers, _LAYERS)
    text.vocab_size, text.pad_token_id = min(text.vocab_size, _WORDS), None
    for name in ("intermediate_size", "moe_intermediate_size"):  # which no token shares with another
        if isinstance(width := getattr(text, name, None), int):
            setattr(text, name, min(width, _WORDS))
    return made
