"""Any language model of Hugging Face ``transformers``, trained, or fine-tuned whole or by a method of ``peft``.

    python -m orchestrator.launch job=hf job.model_name_or_path=my-llama job.train_file=my.jsonl job.peft=lora

``jobs/examples.py`` reads the data, ``jobs/hugging_face.py`` the files of models. They need
``pip install 'orchestrator[hf]'``.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset, Subset

from jobs.examples import Blocks, Encoder, Examples, Padded, leaves_out_text
from jobs.hugging_face import (
    Logits,
    Task,
    first_sentence,
    load_on_meta,
    load_tokenizer,
    place,
    quiet,
    unmatched,
    with_adapters,
)
from jobs.predictions import Predictions, function_named
from jobs.preferences import LogRatios, preference_loss, reward_sums
from jobs.rows import damaged, open_rows
from jobs.tokens import IGNORED, TOKEN_SUFFIXES, Source, open_source
from orchestrator.job import Job, Split

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
SHOWN_DAMAGED = 3
LOOKED_AT = 100
"""The first examples, which are encoded before training to see if they can be."""
LOOKED_THROUGH = 2**17
"""The first examples, which are read before training to see if one is damaged."""
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
            chat template, and only the last one is learned. ``seq2seq`` needs ``prompt`` and ``completion``, ``masked``
            a ``text``, ``classification`` a ``text`` and a ``label`` from 0. ``dpo`` needs a ``prompt``, and answers
            ``chosen`` and ``rejected``; or lists of messages, of which the answers may begin with the prompt.
        validation_file: the held-out examples; None to hold out the last ``validation_split_percentage`` of the others.
        damaged: ``refuse`` names a damaged example and ends; ``skip`` leaves it out.
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
            with quiet() if self._has_files else contextlib.nullcontext():
                model = auto.from_pretrained(place(self.model_name_or_path), dtype=torch.float32, **self._labels)
        else:  # from_pretrained refuses to build a model without memory, as checks do
            source = place(self.model_name_or_path or self.config_name)
            model = auto.from_config(transformers.AutoConfig.from_pretrained(source, **self._labels))
        if self.peft is not None:
            model = with_adapters(model, self._peft_config())
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
        if self.task == "dpo":
            return preference_loss(output, self.beta)
        logits, labels = self._aligned(output, target)
        total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)

    def weight(self, target: Mapping[str, Tensor]) -> int | Tensor:
        labels = target["labels"]
        if self.task == "dpo":
            return len(labels)
        return (labels[:, 1:] if self.task == "causal" else labels).ne(IGNORED).sum()

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
        examples: Any = self.dataset(split)
        for i in range(part, min(len(examples), self.max_predict_samples), parts):
            prompt, answer = self._answer(model, examples[i])
            labels = examples[i]["labels"]
            yield answer[None], {"labels": (labels[len(prompt) :] if self.task == "causal" else labels)[None]}

    @property
    def tokens_per_sample(self) -> int | None:
        return self.block_size if self._fills_blocks("train_file") else None  # examples are padded

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
        val: Any = self.dataset("val") if self.draws_samples else None
        if val is None:
            return None
        tokenizer, texts = self._tokenizer(), []
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
        end = self._tokenizer().eos_token_id
        made = model.model.generate(  # type: ignore[union-attr, operator]
            input_ids=prompt[None].to(device),
            attention_mask=torch.ones_like(prompt)[None].to(device),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
        )[0]
        return prompt, made if self.task == "seq2seq" else made[len(prompt) :]

    def export(self, weights: Mapping[str, Tensor], directory: Path, format: str) -> None:
        if format == "adapter" and self.peft is None:
            raise ValueError("--format=adapter: the run trained the whole model; use --format=hf")
        wrapper = self.model()
        wrapper.load_state_dict(weights)
        model: Any = wrapper.model
        if format == "hf" and self.peft is not None:
            model = model.merge_and_unload()
        with quiet():
            model.save_pretrained(directory)
        self._tokenizer().save_pretrained(directory)

    def check(self) -> None:
        try:
            import transformers  # noqa: F401
        except ImportError as e:
            raise ValueError("job=hf: transformers is not installed: pip install 'orchestrator[hf]'") from e
        if self.model_name_or_path is None and self.config_name is None:
            raise ValueError("job.model_name_or_path=null: set it, or job.config_name for random weights")
        if self.model_name_or_path is not None and self.config_name is not None:
            raise ValueError(f"job.config_name={self.config_name}: job.model_name_or_path is set, too; leave one out")
        if self.train_file is None:
            raise ValueError("job.train_file=null: set it to a .jsonl or a text")
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(f"job.validation_split_percentage={self.validation_split_percentage}: must be in [0, 100)")
        limits = {"block_size": 2, "warmup_steps": 0, "max_new_tokens": 0, "max_predict_samples": 1, "num_labels": 2}
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least {least}")
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"job.mlm_probability={self.mlm_probability:g}: must be in (0, 1]")
        if not 0 < self.beta < math.inf:
            raise ValueError(f"job.beta={self.beta:g}: must be greater than 0, and finite")
        self._check_metrics()
        self._check_rates()
        self._check_model()
        for name in ("train_file", "validation_file"):
            if getattr(self, name) is not None:
                self._check_examples(name)

    def _check_metrics(self) -> None:
        if self.compute_metrics is not None:
            try:
                function_named(self.compute_metrics)
            except ValueError as e:
                raise ValueError(f"job.compute_metrics={self.compute_metrics}: {e}") from e
            if self.task == "dpo":
                raise ValueError(
                    f"job.compute_metrics={self.compute_metrics}: job.task=dpo has rewards in place of predictions, "
                    "which are logged anyway; set it to null"
                )
        if self.predict_with_generate and self.compute_metrics is None:
            raise ValueError("job.predict_with_generate=true: set job.compute_metrics, which gets the answers")
        if self.predict_with_generate and not self.draws_samples:
            raise ValueError(
                f"job.predict_with_generate=true: job.task={self.task} with job.max_new_tokens={self.max_new_tokens} "
                "generates nothing; use causal or seq2seq, and a number above 0"
            )

    def _check_rates(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"job.learning_rate={self.learning_rate:g}: must be greater than 0")
        if self.weight_decay < 0:
            raise ValueError(f"job.weight_decay={self.weight_decay:g}: must be at least 0")
        optimizer = self.optimizer([nn.Parameter(torch.zeros(1))])
        try:
            schedule = self.scheduler(optimizer, 10)
            optimizer.step()
            if not isinstance(schedule, ReduceLROnPlateau):
                schedule.step()
        except (TypeError, ValueError) as e:
            raise ValueError(f"job.lr_scheduler_type={self.lr_scheduler_type}: {first_sentence(e)}") from e

    def _check_model(self) -> None:
        import transformers
        from safetensors import SafetensorError

        key = "model_name_or_path" if self.model_name_or_path is not None else "config_name"
        named = getattr(self, key)

        @contextlib.contextmanager
        def refusing() -> Iterator[None]:
            try:
                yield
            except (OSError, ValueError, ImportError, SafetensorError) as e:
                missing = "" if Path(named).expanduser().exists() else "no such directory, and not found on the hub: "
                raise ValueError(
                    f"job.{key}={named}: {missing}{first_sentence(e)}; set it to a model for job.task={self.task}"
                ) from e

        with refusing():
            saved = transformers.AutoConfig.from_pretrained(place(named))
        has_head = any("ForSequenceClassification" in name for name in saved.architectures or ())
        if self._labels and self.model_name_or_path and has_head and saved.num_labels != self.num_labels:
            raise ValueError(f"job.num_labels={self.num_labels}: {named} has {saved.num_labels}; set it to that")
        with refusing():
            config = transformers.AutoConfig.from_pretrained(place(named), **self._labels)
            model = self._without_memory(config)
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

    def _without_memory(self, config: Any) -> nn.Module:
        import transformers

        auto = getattr(transformers, AUTO_CLASSES[self.task])
        if not self._has_files:
            with torch.device("meta"):
                made: nn.Module = auto.from_config(config)
            return made
        made, missing = load_on_meta(auto, place(self.model_name_or_path), config)
        if missing:
            warnings.warn(
                f"job.model_name_or_path={self.model_name_or_path}: {len(missing)} weights are not in the files and "
                f"begin at random: {', '.join(missing)}",
                stacklevel=1,
            )
        return made

    @property
    def _has_files(self) -> bool:
        """Whether the weights are in a directory, so that a check has told what is in them."""
        return self.model_name_or_path is not None and Path(place(self.model_name_or_path)).exists()

    @property
    def _labels(self) -> Mapping[str, int]:
        return {"num_labels": self.num_labels} if self.task == "classification" else {}

    def _check_peft(self, model: nn.Module) -> None:
        try:
            import peft  # noqa: F401
        except ImportError as e:
            raise ValueError(f"job.peft={self.peft}: peft is not installed: pip install peft") from e
        settings = self._peft_config()
        names = [name for name, _ in model.named_modules() if name]
        known = sorted({name.rpartition(".")[2] for name in names} - set(map(str, range(len(names)))))
        for option in ("target_modules", "modules_to_save"):
            for target in unmatched(self.peft_options.get(option), names):
                near = difflib.get_close_matches(target, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
                raise ValueError(f"job.peft_options.{option}={target}: the model has no such module; {hint}")
        try:
            with torch.device("meta"):
                with_adapters(model, settings)
        except ValueError as e:
            raise ValueError(f"job.peft_options={dict(self.peft_options)}: {first_sentence(e)}") from e

    def _peft_config(self) -> Any:
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

    def _check_examples(self, name: str) -> None:
        key = f"job.{name}={getattr(self, name)}"
        try:
            examples = self._examples(name)
            if isinstance(examples, Examples) and self.damaged == "refuse":
                self._refuse_damaged(examples)
            looked_at = [examples[i] for i in range(min(LOOKED_AT, len(examples)))]
        except OSError as e:
            raise ValueError(f"{key}: cannot be read ({e.strerror})") from e
        except ValueError as e:
            raise ValueError(f"{key}: {e}") from e
        if isinstance(examples, Blocks):
            self._check_tokens(key, examples.source)
        else:
            self._warn_of_losses(key, examples)
        if not looked_at:
            raise ValueError(f"{key}: has no examples, or fewer tokens than job.block_size={self.block_size}")
        first = 1 if self.task in ("causal", "dpo") else 0  # nothing predicts the first token
        if self.task != "classification" and not any(
            bool((e["labels"][..., first:] != IGNORED).any()) for e in looked_at
        ):
            raise ValueError(
                f"{key}: the loss counts no token of the first {len(looked_at)} examples; prompts alone may be longer "
                f"than job.block_size={self.block_size}"
            )

    def _refuse_damaged(self, examples: Examples) -> None:
        if found := damaged(examples.rows, FIELDS[self.task], LOOKED_THROUGH):
            try:
                examples[found[0]]
            except ValueError as e:
                more = f"{len(found)} such examples" if len(found) > 1 else "it"
                raise ValueError(f"{e}; job.damaged=skip leaves out {more}") from e

    def _warn_of_losses(self, key: str, examples: Examples) -> None:
        rows, left_out = examples.rows, examples.left_out
        if left_out:
            named = "; ".join(rows.name(i) for i in left_out[:SHOWN_DAMAGED])
            warnings.warn(f"{key}: {len(left_out)} damaged examples are left out: {named}", stacklevel=1)
        longer = Encoder(replace(self, block_size=self.block_size + 1), self._tokenizer())
        whole = Examples(rows, longer, left_out=left_out)
        looked_at = [whole[i] for i in range(min(LOOKED_AT, len(whole)))]
        of_first = f"of the first {len(looked_at)} examples"
        if cut := [e for e in looked_at if max(e["input_ids"].shape[-1:] + e["labels"].shape[-1:]) > self.block_size]:
            unlearned = sum(
                bool((e["labels"][..., : self.block_size] == IGNORED).all(dim=-1).any())
                for e in cut
                if e["labels"].ndim
            )
            warnings.warn(
                f"{key}: {len(cut)} {of_first} have more than job.block_size={self.block_size} tokens, and are cut"
                + (f"; nothing of {unlearned} is learned, whose prompts fill it" if unlearned else ""),
                stacklevel=1,
            )
        tokenizer, kept = self._tokenizer(), whole.kept[: len(looked_at)]
        if shortened := sum(leaves_out_text(tokenizer, rows.row(int(number))) for number in kept):
            warnings.warn(
                f"{key}: the chat template leaves out a text of {shortened} {of_first}, such as a system message or a "
                "chain of thoughts; messages are learned as the template writes them",
                stacklevel=1,
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

    def _fills_blocks(self, name: str) -> bool:
        return Path(getattr(self, name)).suffix in TOKEN_SUFFIXES

    def _examples(self, name: str) -> Examples | Blocks:
        path = Path(getattr(self, name)).expanduser()
        if self._fills_blocks(name):
            if self.task != "causal":
                raise ValueError(f"tokens are of no use to job.task={self.task}; set it to examples")
            return Blocks(open_source(path, dtype="uint16"), self.block_size)
        rows = open_rows(path)
        left_out = damaged(rows, FIELDS[self.task]) if self.damaged == "skip" else ()
        return Examples(rows, Encoder(self, self._tokenizer()), left_out=left_out)

    def _tokenizer(self) -> Any:
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
        if self.task == "causal":
            output, labels = output[:, :-1], labels[:, 1:]
        return output.flatten(0, -2), labels.flatten()
