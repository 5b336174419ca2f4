"""Any language model of Hugging Face ``transformers``, trained, or fine-tuned whole or by a method of ``peft``.

    python -m orchestrator.launch job=hf job.model_name_or_path=my-llama job.train_file=my.jsonl job.peft=lora

``jobs/examples.py`` reads the data, ``jobs/hugging_face.py`` the files of models. They need
``pip install transformers peft datasets``.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Subset

from jobs import hf_export
from jobs.examples import Blocks, Encoder, Examples, Padded
from jobs.hf_checks import check_hugging_face
from jobs.hugging_face import (
    AUTO_CLASSES,
    FIELDS,
    Logits,
    Task,
    align_special_tokens,
    load_config,
    load_tokenizer,
    padding_of,
    pads_before,
    place,
    quiet,
    with_adapters,
)
from jobs.packing import packed
from jobs.predictions import Predictions
from jobs.preferences import LogRatios, preference_loss, reward_sums
from jobs.rows import damaged, open_rows
from jobs.tokens import IGNORED, TOKEN_SUFFIXES, open_source
from orchestrator.job import Job, Split

SHOWN_PROMPTS = 3


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Job):
    """A model of ``transformers``; fields have the names of the options of its ``run_clm.py``.

    After evaluations, models that write texts answer the first prompts of the held-out examples.

    Attributes:
        model_name_or_path: a directory, or a name on the hub; None for random weights.
        config_name: the configuration of a model with random weights.
        tokenizer_name: where the tokenizer is; None if it is with the model.
        train_file: ``.jsonl``, ``.parquet``, a directory of ``datasets.save_to_disk``, a text with an example in each
            line, or tokens of ``orchestrator tokenize``, which fill each ``block_size``. A ``causal`` example has a
            ``text``; or a ``prompt`` and a ``completion``, and only the completion is learned; or ``messages`` for the
            chat template, and only the last one is learned, which has to be an answer. ``seq2seq`` needs ``prompt`` and
            ``completion``, ``masked`` a ``text``, ``classification`` a ``text``, or also a ``text_pair``, and a
            ``label`` from 0. ``dpo`` needs a ``prompt``, and answers ``chosen`` and ``rejected``; or lists of messages,
            of which the answers may begin with the prompt.
        validation_file: the held-out examples; None to hold out the last ``validation_split_percentage`` of the others.
        damaged: ``refuse`` names a damaged example and ends; ``skip`` leaves it out.
        assistant_only_loss: whether all answers of ``messages`` are learned, and not only the last one; where they are
            is what the ``{% generation %}`` markers of the chat template say, if it has any.
        packing: whether a sample has several examples, as many as ``block_size`` has room for; none sees another.
        block_size: the tokens to which an example is cut, and padded, because pipelines need it.
        pad_to_max_length: False to pad only to the longest example of the batch.
        beta: how strongly ``dpo`` holds on to the reference, which is the model before the training.
        peft: the method, such as ``lora``, whose additions alone are trained.
        peft_options: the fields of the configuration of this method (``use_dora`` for DoRA).
        max_new_tokens: the length of an answer; each token is the most probable one.
        compute_metrics: a function for evaluations, such as ``my_metrics.compute_metrics``, as ``Trainer`` takes it; it
            replaces the accuracy. Predictions of tokens are the most probable ones, and others are logits.
        predict_with_generate: whether its predictions are answers to prompts, and its labels the expected answers.
        max_predict_samples: the first held-out examples, which are answered for it.
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
    assistant_only_loss: bool = False
    packing: bool = False
    beta: float = 0.1
    peft: str | None = None
    peft_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    warmup_steps: int = 0
    lr_scheduler_type: str = "linear"
    max_new_tokens: int = 50
    compute_metrics: str | None = None
    predict_with_generate: bool = False
    max_predict_samples: int = 100

    def model(self) -> nn.Module:
        import transformers

        auto = getattr(transformers, AUTO_CLASSES[self.task])
        if self.model_name_or_path is not None and torch.get_default_device().type != "meta":
            with quiet() if self.has_files else contextlib.nullcontext():
                model = auto.from_pretrained(place(self.model_name_or_path), dtype=torch.float32, **self.label_options)
        else:  # from_pretrained refuses to build a model without memory, as checks do
            source = place(self.model_name_or_path or self.config_name)
            model = auto.from_config(transformers.AutoConfig.from_pretrained(source, **self.label_options))
        align_special_tokens(model, self.tokenizer(), self.task)
        if self.peft is not None:
            model = with_adapters(model, self.peft_config())
        if self.task == "dpo":
            return LogRatios(model, has_adapters=self.peft is not None)
        return Logits(model, self.task).train()  # from_pretrained returns a model in eval mode

    @classmethod
    def fields_to_evaluate(cls, paths: Sequence[str]) -> Mapping[str, Any]:
        if len(paths) > 1:
            raise ValueError(
                f"--data {paths[1]}: job=hf reads one file; join the files, or evaluate one after the other"
            )
        return {"train_file": paths[0], "validation_file": paths[0]}

    def dataset(self, split: Split) -> Dataset[dict[str, Tensor]] | None:
        examples = self.split_examples(split)
        return packed(examples, self.block_size) if self.packing and examples is not None else examples

    def split_examples(self, split: Split) -> Dataset[dict[str, Tensor]] | None:
        """Return the examples of a split, one by one."""
        train = self.examples("train_file")
        if self.validation_file is not None:
            return train if split == "train" else self.examples("validation_file")
        held_out = len(train) * self.validation_split_percentage // 100
        kept = len(train) - held_out
        if split == "train":
            return Subset(train, range(kept))
        return Subset(train, range(kept, len(train))) if held_out else None

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        length = self.block_size if self.pad_to_max_length else None
        return Padded(token=self.padding, length=length, before=pads_before(self.config))

    def loss(self, output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        if self.task == "dpo":
            return preference_loss(output, self.beta)
        logits, labels = self._aligned(output, target)
        total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)

    def aligned(self, target: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.task != "causal":
            return target
        return {**target, "shift_labels": F.pad(target["labels"][:, 1:], (0, 1), value=IGNORED)}

    def weight(self, target: Mapping[str, Tensor]) -> int | Tensor:
        labels = target["labels"]
        if self.task == "dpo":
            return len(labels)
        if self.task == "causal":
            labels = target["shift_labels"] if "shift_labels" in target else labels[:, 1:]
        return labels.ne(IGNORED).sum()

    def metrics(self, output: Tensor, target: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.task == "dpo":
            return reward_sums(output, self.beta)
        if self.compute_metrics is not None:
            return {}
        logits, labels = self._aligned(output, target)
        return {"accuracy": (logits.argmax(dim=-1) == labels).sum()}

    def train_metrics(self, output: Tensor, target: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return reward_sums(output, self.beta) if self.task == "dpo" else {}

    def metric_objects(self, split: Split) -> Mapping[str, Any]:
        return {} if self.compute_metrics is None else {"compute_metrics": Predictions(self.compute_metrics)}

    @property
    def makes_predictions(self) -> bool:
        return self.predict_with_generate

    def predictions(
        self, model: nn.Module, split: Split, part: int, parts: int
    ) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        examples: Any = self.split_examples(split)
        for i in range(part, min(len(examples), self.max_predict_samples), parts):
            prompt, answer = self._answer(model, examples[i])
            labels = examples[i]["labels"]
            if self.task == "causal":
                labels = labels[len(prompt) :]
                ends = int((labels == IGNORED).int().argmax()) or None  # where several answers are learned
                labels = labels[:ends]
            yield answer[None], {"labels": labels[None]}

    @property
    def tokens_per_sample(self) -> int | None:
        return self.block_size if self.fills_blocks("train_file") else None  # examples are padded

    @property
    def reports_perplexity(self) -> bool:
        return self.task not in ("classification", "dpo")

    def stages(self, model: nn.Module) -> Sequence[nn.Module] | None:
        if self.task == "dpo" and self.peft is not None:  # whether adapters are on is no part of a recorded layer
            raise ValueError(
                f"job.peft={self.peft}: job.task=dpo computes the reference with the layers that it trains, so they "
                "cannot be divided into stages; use strategy=fsdp, or job.peft=null"
            )
        return None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        from transformers import get_scheduler

        made: LRScheduler = get_scheduler(
            self.lr_scheduler_type, optimizer, num_warmup_steps=self.warmup_steps, num_training_steps=steps
        )
        return made

    @property
    def draws_samples(self) -> bool:
        return self.task in ("causal", "seq2seq", "dpo") and self.max_new_tokens > 0

    def sample(self, model: nn.Module, generator: torch.Generator) -> str | None:
        val: Any = self.split_examples("val") if self.draws_samples else None
        if val is None:
            return None
        tokenizer, texts = self.tokenizer(), []
        for i in range(min(len(val), SHOWN_PROMPTS)):
            prompt, answer = (tokenizer.decode(t, skip_special_tokens=True) for t in self._answer(model, val[i]))
            texts.append(f"{prompt}\n-> {answer}")
        return "\n\n".join(texts)

    def _answer(self, model: nn.Module, example: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tokens of a prompt, and of the answer. An answer by itself depends on no padding."""
        prompt, labels = (torch.atleast_2d(example[name])[0] for name in ("input_ids", "labels"))
        device = next(model.parameters()).device
        if self.task != "seq2seq":
            first = int((labels != IGNORED).int().argmax())
            prompt = prompt[: first or min(8, len(prompt))]  # the first words of a text without a prompt
        made = model.model.generate(  # type: ignore[union-attr, operator]
            input_ids=prompt[None].to(device),
            attention_mask=torch.ones_like(prompt)[None].to(device),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            pad_token_id=self.padding,
        )[0]
        return prompt, made if self.task == "seq2seq" else made[len(prompt) :]

    def export(self, weights: Mapping[str, Tensor], directory: Path, format: str) -> None:
        hf_export.write(self, weights, directory, format)

    def exported(self, directory: Path, format: str) -> nn.Module | None:
        return hf_export.load(self, directory, format)

    def example_inputs(self) -> Mapping[str, Tensor]:
        text = "one two"
        row = {**dict.fromkeys(("text", "prompt", "completion", "chosen", "rejected"), text), "label": 1}
        batch: Mapping[str, Tensor] = self.collate([self.encoder(self.tokenizer())(row)] * 2)
        return batch

    def check(self) -> None:
        check_hugging_face(self)

    @property
    def has_files(self) -> bool:
        """Whether the weights are in a directory, so that a check has told what is in them."""
        return self.model_name_or_path is not None and Path(place(self.model_name_or_path)).exists()

    @property
    def config(self) -> Any:
        return load_config(place(self.model_name_or_path or self.config_name))

    @property
    def padding(self) -> int:
        """The token that fills up examples."""
        return padding_of(self.config, self.tokenizer())

    @property
    def label_options(self) -> Mapping[str, int]:
        return {"num_labels": self.num_labels} if self.task == "classification" else {}

    def peft_config(self) -> Any:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

        known = [kind.value.lower() for kind in PeftType]
        if str(self.peft).lower() not in known:
            near = difflib.get_close_matches(str(self.peft).lower(), known, n=1) or known
            raise ValueError(f"job.peft={self.peft}: unknown; did you mean {' or '.join(near)}?")
        kinds = {"causal": "CAUSAL_LM", "dpo": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}
        make = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(str(self.peft).upper())]
        try:
            return make(task_type=kinds.get(self.task), **self.peft_options)
        except (TypeError, ValueError) as e:
            raise ValueError(f"job.peft_options={dict(self.peft_options)}: {e}") from e

    def fills_blocks(self, name: str) -> bool:
        return Path(getattr(self, name)).suffix in TOKEN_SUFFIXES

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return what makes tensors of an example."""
        return Encoder(
            tokenizer=tokenizer,
            task=self.task,
            block_size=self.block_size,
            num_labels=self.num_labels,
            mlm_probability=self.mlm_probability,
            assistant_only_loss=self.assistant_only_loss,
        )

    def examples(self, name: str) -> Examples | Blocks:
        path = Path(getattr(self, name)).expanduser()
        if self.fills_blocks(name):
            if self.task != "causal":
                raise ValueError(f"tokens are of no use to job.task={self.task}; set it to examples")
            return Blocks(open_source(path, dtype="uint16"), self.block_size)
        rows = open_rows(path)
        left_out = damaged(rows, FIELDS[self.task]) if self.damaged == "skip" else ()
        return Examples(rows, self.encoder(self.tokenizer()), left_out=left_out)

    def tokenizer(self) -> Any:
        named = self.tokenizer_name or self.model_name_or_path or self.config_name
        try:
            return load_tokenizer(place(named))
        except (OSError, ValueError, ImportError) as e:
            key = "job.tokenizer_name=" + (self.tokenizer_name or "null")
            raise ValueError(
                f"{key}: there is no tokenizer in {named}; set it to a directory or a name with one"
            ) from e

    def _aligned(self, output: Tensor, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits of shape (predictions, classes), and the label of each."""
        labels = target["labels"]
        if "shift_labels" in target:
            labels = target["shift_labels"]
        elif self.task == "causal":
            output, labels = output[:, :-1], labels[:, 1:]
        return output.flatten(0, -2), labels.flatten()
