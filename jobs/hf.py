"""Any language model of Hugging Face ``transformers``, trained, or fine-tuned whole or by a method of ``peft``.

    python -m orchestrator.launch job=hf job.model_name_or_path=my-llama job.train_file=my.jsonl job.peft=lora

``jobs/examples.py`` reads the data. It takes ``pip install 'orchestrator[hf]'``.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

from jobs.examples import Blocks, Encoder, Examples, Padded
from jobs.rows import damaged, open_rows
from jobs.tokens import IGNORED, TOKEN_SUFFIXES, Source, open_source
from orchestrator.job import Job, Split

Task = Literal["causal", "masked", "seq2seq", "classification"]
AUTO_CLASSES: Mapping[Task, str] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
}
FIELDS: Mapping[Task, tuple[tuple[str, ...], ...]] = {
    "causal": (("text",), ("prompt", "completion"), ("messages",)),
    "masked": (("text",),),
    "seq2seq": (("prompt", "completion"),),
    "classification": (("text", "label"),),
}
"""The fields of an example, of which it has one combination."""
SHOWN_DAMAGED = 3
LOOKED_AT = 100
"""The first examples, which are encoded before training to see if they can be."""
SHOWN_PROMPTS = 3


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Job):
    """A model of ``transformers``; fields have the names of the options of its ``run_clm.py``.

    Model: ``model_name_or_path`` is a directory or a name on the hub; null: random weights for the configuration in
    ``config_name``. ``tokenizer_name`` is where the tokenizer is, if not there too. ``peft`` trains only what this
    method adds, such as ``lora``, with ``peft_options``: the fields of its configuration (``use_dora`` for DoRA).

    Data: ``train_file`` is ``.jsonl``, ``.parquet``, a directory of ``datasets.save_to_disk``, or a text with an
    example in each line; or tokens of ``orchestrator tokenize``, which fill each ``block_size``. ``causal`` examples
    have a ``text``; or a ``prompt`` and a ``completion``, which alone is learned; or ``messages`` for the chat
    template, of which the last one is learned. ``seq2seq`` has ``prompt`` and ``completion``, ``masked`` a ``text``,
    ``classification`` a ``text`` and a ``label`` from 0. Without ``validation_file``, the last
    ``validation_split_percentage`` of the examples are held out. A damaged example is refused by name, or left out
    with ``damaged=skip``. Examples are cut to ``block_size`` tokens and padded to it, as pipelines need it; with
    ``pad_to_max_length=false`` only to the longest of the batch.

    After evaluations, ``causal`` and ``seq2seq`` models answer the first prompts of the held-out examples, with up to
    ``max_new_tokens`` tokens, the most probable in each place.
    """

    export_formats: ClassVar[tuple[str, ...]] = ("hf", "adapter")

    task: Task = "causal"
    model_name_or_path: str | None = None
    config_name: str | None = None
    tokenizer_name: str | None = None
    train_file: str | None = None
    validation_file: str | None = None
    validation_split_percentage: int = 5
    damaged: Literal["refuse", "skip"] = "refuse"
    block_size: int = 512
    pad_to_max_length: bool = True
    num_labels: int = 2
    mlm_probability: float = 0.15
    peft: str | None = None
    peft_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    warmup_steps: int = 0
    lr_scheduler_type: str = "linear"
    max_new_tokens: int = 50

    def model(self) -> nn.Module:
        import transformers

        auto = getattr(transformers, AUTO_CLASSES[self.task])
        labels = {"num_labels": self.num_labels} if self.task == "classification" else {}
        if self.model_name_or_path is not None and torch.get_default_device().type != "meta":
            with _no_progress_bars():
                model = auto.from_pretrained(_place(self.model_name_or_path), dtype=torch.float32, **labels)
        else:  # from_pretrained refuses to build a model without memory, as checks do
            place = _place(self.model_name_or_path or self.config_name)
            model = auto.from_config(transformers.AutoConfig.from_pretrained(place, **labels))
        if self.peft is not None:
            model = _with_adapters(model, self._peft_config())
        return Logits(model, self.task).train()  # from_pretrained returns a model in eval mode

    @classmethod
    def fields_to_evaluate(cls, paths: Sequence[str]) -> Mapping[str, Any]:
        if len(paths) > 1:
            raise ValueError(
                f"--data {paths[1]}: job=hf reads one file; join the files, or evaluate one after the other"
            )
        return {"train_file": paths[0], "validation_file": paths[0]}

    def dataset(self, split: Split) -> Dataset[dict[str, Tensor]] | None:
        train = self._examples("train_file")
        if self.validation_file is not None:
            return train if split == "train" else self._examples("validation_file")
        held_out = len(train) * self.validation_split_percentage // 100
        kept = len(train) - held_out
        if split == "train":
            return Subset(train, range(kept))
        return Subset(train, range(kept, len(train))) if held_out else None

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        tokenizer = self._tokenizer()
        token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return Padded(token=token or 0, length=self.block_size if self.pad_to_max_length else None)

    def loss(self, output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self._aligned(output, target)
        total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)

    def weight(self, target: Mapping[str, Tensor]) -> Tensor:
        labels = target["labels"]
        return (labels[:, 1:] if self.task == "causal" else labels).ne(IGNORED).sum()

    def metrics(self, output: Tensor, target: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        logits, labels = self._aligned(output, target)
        return {"accuracy": (logits.argmax(dim=-1) == labels).sum()}

    @property
    def reports_perplexity(self) -> bool:
        return self.task != "classification"

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        from transformers import get_scheduler

        made: LRScheduler = get_scheduler(
            self.lr_scheduler_type, optimizer, num_warmup_steps=self.warmup_steps, num_training_steps=steps
        )
        return made

    def sample(self, model: nn.Module, generator: torch.Generator) -> str | None:
        val: Any = self.dataset("val")
        if self.task not in ("causal", "seq2seq") or val is None or not self.max_new_tokens:
            return None
        tokenizer, device = self._tokenizer(), next(model.parameters()).device
        texts = []
        for example, _ in zip((val[i] for i in range(len(val))), range(SHOWN_PROMPTS), strict=False):
            prompt = example["input_ids"]
            if self.task == "causal":
                first = int((example["labels"] != IGNORED).int().argmax())
                prompt = prompt[: first or min(8, len(prompt))]  # the first words of a text without a prompt
            made = model.model.generate(  # type: ignore[union-attr, operator]
                input_ids=prompt[None].to(device),
                attention_mask=torch.ones_like(prompt)[None].to(device),
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id,
            )[0]
            written = made[len(prompt) :] if self.task == "causal" else made
            texts.append(
                f"{tokenizer.decode(prompt, skip_special_tokens=True)}\n-> "
                f"{tokenizer.decode(written, skip_special_tokens=True)}"
            )
        return "\n\n".join(texts)

    def export(self, weights: Mapping[str, Tensor], directory: Path, format: str) -> None:
        if format == "adapter" and self.peft is None:
            raise ValueError("--format=adapter: the run trained the whole model; use --format=hf")
        wrapper = self.model()
        wrapper.load_state_dict(weights)
        model: Any = wrapper.model
        if format == "hf" and self.peft is not None:
            model = model.merge_and_unload()
        with _no_progress_bars():
            model.save_pretrained(directory)
        self._tokenizer().save_pretrained(directory)

    def check(self) -> None:
        try:
            import transformers  # noqa: F401
        except ImportError as e:
            raise ValueError("job=hf: transformers is not installed: pip install 'orchestrator[hf]'") from e
        if (self.model_name_or_path is None) == (self.config_name is None):
            raise ValueError("job.model_name_or_path=null: set it, or job.config_name for random weights")
        if self.train_file is None:
            raise ValueError("job.train_file=null: set it to a .jsonl or a text")
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(f"job.validation_split_percentage={self.validation_split_percentage}: must be in [0, 100)")
        for name, least in {"block_size": 2, "warmup_steps": 0, "max_new_tokens": 0, "num_labels": 2}.items():
            if getattr(self, name) < least:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least {least}")
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"job.mlm_probability={self.mlm_probability:g}: must be in (0, 1]")
        self._check_model()
        for name in ("train_file", "validation_file"):
            if getattr(self, name) is not None:
                self._check_examples(name)

    def _check_model(self) -> None:
        import transformers

        key = "model_name_or_path" if self.model_name_or_path is not None else "config_name"
        place = getattr(self, key)
        try:
            config = transformers.AutoConfig.from_pretrained(_place(place))
            with torch.device("meta"):
                model = getattr(transformers, AUTO_CLASSES[self.task]).from_config(config)
        except (OSError, ValueError, ImportError) as e:
            missing = "" if Path(place).expanduser().exists() else "no such directory, and not found on the hub: "
            raise ValueError(
                f"job.{key}={place}: {missing}{_first_sentence(e)}; set it to a model for job.task={self.task}"
            ) from e
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and self.block_size > longest:
            raise ValueError(
                f"job.block_size={self.block_size}: the model has positions for {longest} tokens; lower it"
            )
        tokens = len(self._tokenizer())
        if tokens > config.get_text_config().vocab_size:
            raise ValueError(
                f"job.tokenizer_name={self.tokenizer_name or 'null'}: the tokenizer has {tokens} tokens, but the model "
                f"knows only {config.get_text_config().vocab_size}; set it to the tokenizer of the model"
            )
        if self.peft is not None:
            self._check_peft(model)

    def _check_peft(self, model: nn.Module) -> None:
        try:
            import peft  # noqa: F401
        except ImportError as e:
            raise ValueError(f"job.peft={self.peft}: peft is not installed: pip install peft") from e
        settings = self._peft_config()
        try:
            with torch.device("meta"):
                _with_adapters(model, settings)
        except ValueError as e:
            targets = self.peft_options.get("target_modules") or []
            known = sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if name})
            near = [n for target in targets for n in difflib.get_close_matches(str(target), known, n=1)]
            hint = f"did you mean {near[0]}?" if near else f"the model has {', '.join(known)}"
            raise ValueError(f"job.peft_options.target_modules={targets}: {_first_sentence(e)}; {hint}") from e

    def _peft_config(self) -> Any:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

        known = [kind.value.lower() for kind in PeftType]
        if str(self.peft).lower() not in known:
            near = difflib.get_close_matches(str(self.peft).lower(), known, n=1) or known
            raise ValueError(f"job.peft={self.peft}: unknown; did you mean {' or '.join(near)}?")
        kinds = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS", "masked": None}
        make = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(str(self.peft).upper())]
        try:
            return make(task_type=kinds[self.task], **self.peft_options)
        except (TypeError, ValueError) as e:
            raise ValueError(f"job.peft_options={dict(self.peft_options)}: {e}") from e

    def _check_examples(self, name: str) -> None:
        key = f"job.{name}={getattr(self, name)}"
        try:
            examples = self._examples(name)
            looked_at = [examples[i] for i in range(min(LOOKED_AT, len(examples)))]
        except OSError as e:
            raise ValueError(f"{key}: cannot be read ({e.strerror})") from e
        except ValueError as e:
            raise ValueError(f"{key}: {e}") from e
        if isinstance(examples, Blocks):
            self._check_tokens(key, examples.source)
        elif left_out := len(examples.rows) - len(examples):
            named = [examples.rows.name(i) for i in damaged(examples.rows, FIELDS[self.task])[:SHOWN_DAMAGED]]
            warnings.warn(f"{key}: {left_out} damaged examples are left out: {'; '.join(named)}", stacklevel=1)
        if not looked_at:
            raise ValueError(f"{key}: has no examples, or fewer tokens than job.block_size={self.block_size}")
        if self.task != "classification" and not any(bool((e["labels"] != IGNORED).any()) for e in looked_at):
            raise ValueError(
                f"{key}: the loss counts no token of the first {len(looked_at)} examples; prompts alone may be longer "
                f"than job.block_size={self.block_size}"
            )

    def _check_tokens(self, key: str, source: Source) -> None:
        known, largest = len(self._tokenizer()), source.largest
        if largest is None:
            largest = int(source.tokens.max()) if len(source.tokens) else 0
        if largest >= known:
            raise ValueError(
                f"{key}: holds token {largest}, and the tokenizer has {known}; make the tokens with the tokenizer of "
                "the model"
            )

    def _examples(self, name: str) -> Examples | Blocks:
        path = Path(getattr(self, name)).expanduser()
        if path.suffix in TOKEN_SUFFIXES:
            if self.task != "causal":
                raise ValueError(f"tokens are of no use to job.task={self.task}; set it to examples")
            return Blocks(open_source(path, dtype="uint16"), self.block_size)
        rows = open_rows(path)
        left_out = damaged(rows, FIELDS[self.task]) if self.damaged == "skip" else ()
        return Examples(rows, Encoder(self, self._tokenizer()), left_out=left_out)

    def _tokenizer(self) -> Any:
        place = self.tokenizer_name or self.model_name_or_path or self.config_name
        try:
            return _load_tokenizer(_place(place))
        except (OSError, ValueError, ImportError) as e:
            key = "job.tokenizer_name=" + (self.tokenizer_name or "null")
            raise ValueError(
                f"{key}: there is no tokenizer in {place}; set it to a directory or a name with one"
            ) from e

    def _aligned(self, output: Tensor, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits of shape (predictions, classes), and the label of each."""
        labels = target["labels"]
        if self.task == "causal":
            output, labels = output[:, :-1], labels[:, 1:]
        return output.flatten(0, -2), labels.flatten()


class Logits(nn.Module):
    """Calls a model with the tensors of a batch, and returns its logits."""

    def __init__(self, model: Any, task: Task):
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if self.task == "seq2seq":
            labels = batch["labels"]
            inputs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
        if self.task in ("causal", "seq2seq"):
            inputs["use_cache"] = False  # a cache could not flow between stages
        logits: Tensor = self.model(**inputs).logits
        # Methods such as prompt tuning put tokens of their own before a text.
        return logits[:, -batch["input_ids"].shape[1] :] if self.task == "causal" else logits


def _with_adapters(model: nn.Module, settings: Any) -> nn.Module:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft asks for a property that transformers has renamed.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        made: nn.Module = get_peft_model(model, settings)
    return made


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the bars of ``transformers``, which every worker would write."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=4)
def _load_tokenizer(place: str) -> Any:
    """Return a tokenizer, which nobody changes; reading it takes a part of a second."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place)


def _place(text: str | None) -> str:
    assert text is not None
    path = Path(text).expanduser()
    return str(path) if path.exists() else text


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0][:300]
