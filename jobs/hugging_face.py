"""Models of Hugging Face: their files, read without reports on the console, their adapters, and their logits."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from jobs.examples import POSITIONS, SEGMENTS

Task = Literal["causal", "masked", "seq2seq", "classification", "dpo"]
AUTO_CLASSES: Mapping[Task, str] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
    "dpo": "AutoModelForCausalLM",
}
FIELDS: Mapping[Task, tuple[tuple[str, ...], ...]] = {
    "causal": (("text",), ("prompt", "completion"), ("messages",)),
    "masked": (("text",),),
    "seq2seq": (("prompt", "completion"),),
    "classification": (("text", "label"),),
    "dpo": (("chosen", "rejected"),),
}
"""The fields of an example, of which it has one combination."""


def load_on_meta(auto: Any, directory: str, config: Any) -> tuple[nn.Module, Sequence[str]]:
    """Build a model on the meta device. Return it, and the names of its weights that are not in the directory.

    Raises:
        ValueError: the weights are of another model: the first difference, and how many there are.
        OSError, SafetensorError: a file is missing or damaged.
    """
    with quiet():
        made, found = auto.from_pretrained(
            directory, config=config, device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True
        )
    missing = sorted(found["missing_keys"])
    faults = [
        f"{name} is of shape {list(theirs)}, not {list(ours)}"
        for name, theirs, ours in sorted(found["mismatched_keys"])
    ]
    # A head that is missing is to be trained; a part of a block is not.
    faults += [f"{name} is missing" for name in missing if re.search(r"\.\d+\.", name)]
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(f"{faults[0]}{more}: the weights are of another model than config.json")
    return made, missing


def with_adapters(model: nn.Module, settings: Any) -> nn.Module:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft asks for a property that transformers has renamed.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        warnings.filterwarnings("ignore", ".*tie_word_embeddings.*")  # an export unties them
        made: nn.Module = get_peft_model(model, settings)
    return made


def unmatched(targets: object, names: Sequence[str]) -> list[str]:
    """Return the targets that no module has: of a list, whole names or ends of them; a text is a pattern."""
    if isinstance(targets, str):
        with contextlib.suppress(re.error):
            if targets == "all-linear" or any(re.fullmatch(targets, name) for name in names):
                return []
        return [targets]
    if not isinstance(targets, list | tuple):  # left out, or peft says what is wrong
        return []
    return [str(target) for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the bars and reports of ``transformers``, which every worker would write; a check has told what they say."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=4)
def load_tokenizer(place: str) -> Any:
    """Return a tokenizer, which nobody changes; reading it takes a part of a second."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place)


@functools.lru_cache(maxsize=4)
def load_config(place: str) -> Any:
    """Return a configuration, which nobody changes."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(place)


def padding_of(config: Any, tokenizer: Any) -> int:
    """Return the token that fills up texts: the model's, which a head for classes looks for, or the tokenizer's."""
    config = config.get_text_config()
    words = getattr(config, "vocab_size", len(tokenizer))
    known = (getattr(config, "pad_token_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in known if token is not None and 0 <= token < words), 0)


def pads_before(config: Any) -> bool:
    """Return whether the model makes its prediction of a text at the last place, as XLNet does."""
    return getattr(config, "summary_type", None) == "last"


def align_special_tokens(model: Any, tokenizer: Any, task: Task) -> None:
    """Let answers end at the tokenizer's end too, and a head for classes know the padding, as ``Trainer`` does."""
    if task == "classification":
        config = model.config.get_text_config()
        config.pad_token_id = padding_of(config, tokenizer)
    if (generation := getattr(model, "generation_config", None)) is None or tokenizer.eos_token_id is None:
        return
    if tokenizer.eos_token_id not in (ends := _listed(generation.eos_token_id)):
        generation.eos_token_id = [tokenizer.eos_token_id, *ends]


def ends_of(named: str, config: Any, tokenizer: Any) -> set[int]:
    """Return the tokens at which the model ``named`` ends an answer after :func:`align_special_tokens`."""
    from transformers import GenerationConfig

    ends = getattr(config.get_text_config(), "eos_token_id", None)
    with contextlib.suppress(OSError):  # it has no generation_config.json
        ends = GenerationConfig.from_pretrained(place(named)).eos_token_id
    return {*_listed(ends), *_listed(tokenizer.eos_token_id)}


def _listed(tokens: int | Sequence[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def place(text: str | None) -> str:
    """Return the path of a directory or a file, ``~`` expanded; or the text, if there is none: a name on the hub."""
    assert text is not None
    path = Path(text).expanduser()
    return str(path) if path.exists() else text


def first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0][:300]


class Logits(nn.Module):
    """Calls a model with the tensors of a batch, and returns its logits."""

    def __init__(self, model: Any, task: Task):
        super().__init__()
        self.model = model
        self.task = task
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.takes_segments = SEGMENTS in inspect.signature(plain.forward).parameters

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        # With positions alone, models find where a packed example begins, which a mask of padding would hide.
        names = ("input_ids", POSITIONS if POSITIONS in batch else "attention_mask")
        inputs: dict[str, Any] = {name: batch[name] for name in names}
        if SEGMENTS in batch and self.takes_segments:
            inputs[SEGMENTS] = batch[SEGMENTS]
        if self.task == "seq2seq":
            labels = batch["labels"]
            inputs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
        if self.task in ("causal", "seq2seq"):
            inputs["use_cache"] = False  # a cache could not flow between stages
        logits: Tensor = self.model(**inputs).logits
        # Methods such as prompt tuning put tokens of their own before a text.
        return logits[:, -batch["input_ids"].shape[1] :] if self.task == "causal" else logits
