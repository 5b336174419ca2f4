"""What is wrong with the fields, the model or the data of ``job=hf``, before anything starts."""

from __future__ import annotations

import contextlib
import difflib
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from jobs.chats import leaves_out_text
from jobs.examples import Blocks, Examples
from jobs.hugging_face import (
    AUTO_CLASSES,
    FIELDS,
    ends_of,
    first_sentence,
    load_on_meta,
    place,
    unmatched,
    with_adapters,
)
from jobs.packing import refusal
from jobs.predictions import function_named
from jobs.rows import damaged
from jobs.tokens import IGNORED, Source

if TYPE_CHECKING:
    from jobs.hf import HuggingFace

SHOWN_DAMAGED = 3
LOOKED_AT = 100
"""The first examples, which are encoded before training to see if they can be."""
LOOKED_THROUGH = 2**17
"""The first examples, which are read before training to see if one is damaged."""


def check_hugging_face(job: HuggingFace) -> None:
    """Raise if a run of the job cannot go well.

    Raises:
        ValueError: why, with the field to change.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as e:
        raise ValueError("job=hf: transformers is not installed: pip install transformers peft datasets") from e
    if job.model_name_or_path is None and job.config_name is None:
        raise ValueError("job.model_name_or_path=null: set it, or job.config_name for random weights")
    if job.model_name_or_path is not None and job.config_name is not None:
        raise ValueError(f"job.config_name={job.config_name}: job.model_name_or_path is set, too; leave one out")
    if job.train_file is None:
        raise ValueError("job.train_file=null: set it to a .jsonl or a text")
    if not 0 <= job.validation_split_percentage < 100:
        raise ValueError(f"job.validation_split_percentage={job.validation_split_percentage}: must be in [0, 100)")
    limits = {"block_size": 2, "warmup_steps": 0, "max_new_tokens": 0, "max_predict_samples": 1, "num_labels": 2}
    for name, least in limits.items():
        if getattr(job, name) < least:
            raise ValueError(f"job.{name}={getattr(job, name)}: must be at least {least}")
    if not 0 < job.mlm_probability <= 1:
        raise ValueError(f"job.mlm_probability={job.mlm_probability:g}: must be in (0, 1]")
    if not 0 < job.beta < math.inf:
        raise ValueError(f"job.beta={job.beta:g}: must be greater than 0, and finite")
    _check_metrics(job)
    _check_rates(job)
    _check_chats(job)
    _check_model(job)
    for name in ("train_file", "validation_file"):
        if getattr(job, name) is not None:
            _check_examples(job, name)


def _check_metrics(job: HuggingFace) -> None:
    if job.compute_metrics is not None:
        try:
            function_named(job.compute_metrics)
        except ValueError as e:
            raise ValueError(f"job.compute_metrics={job.compute_metrics}: {e}") from e
        if job.task == "dpo":
            raise ValueError(
                f"job.compute_metrics={job.compute_metrics}: job.task=dpo has rewards in place of predictions, "
                "which are logged anyway; set it to null"
            )
    if job.predict_with_generate and job.compute_metrics is None:
        raise ValueError("job.predict_with_generate=true: set job.compute_metrics, which gets the answers")
    if job.predict_with_generate and not job.draws_samples:
        raise ValueError(
            f"job.predict_with_generate=true: job.task={job.task} with job.max_new_tokens={job.max_new_tokens} "
            "generates nothing; use causal or seq2seq, and a number above 0"
        )


def _check_chats(job: HuggingFace) -> None:
    for name in ("assistant_only_loss", "packing"):
        if getattr(job, name) and job.task != "causal":
            raise ValueError(f"job.{name}=true: only for job.task=causal, not {job.task}; set it to false")
    if job.packing and job.fills_blocks("train_file"):
        raise ValueError("job.packing=true: tokens of job.train_file fill each job.block_size already; set it to false")
    if job.packing and job.peft is not None and job.peft_config().is_prompt_learning:
        raise ValueError(
            f"job.packing=true: job.peft={job.peft} puts tokens before a sample, and not before each of its examples; "
            "set it to false"
        )


def _check_rates(job: HuggingFace) -> None:
    if job.learning_rate <= 0:
        raise ValueError(f"job.learning_rate={job.learning_rate:g}: must be greater than 0")
    if job.weight_decay < 0:
        raise ValueError(f"job.weight_decay={job.weight_decay:g}: must be at least 0")
    optimizer = job.optimizer([nn.Parameter(torch.zeros(1))])
    try:
        schedule = job.scheduler(optimizer, 10)
        optimizer.step()
        if not isinstance(schedule, ReduceLROnPlateau):
            schedule.step()
    except (TypeError, ValueError) as e:
        raise ValueError(f"job.lr_scheduler_type={job.lr_scheduler_type}: {first_sentence(e)}") from e


def _check_model(job: HuggingFace) -> None:
    import transformers
    from safetensors import SafetensorError

    key = "model_name_or_path" if job.model_name_or_path is not None else "config_name"
    named = getattr(job, key)

    @contextlib.contextmanager
    def refusing() -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, ImportError, SafetensorError) as e:
            missing = "" if Path(named).expanduser().exists() else "no such directory, and not found on the hub: "
            raise ValueError(
                f"job.{key}={named}: {missing}{first_sentence(e)}; set it to a model for job.task={job.task}"
            ) from e

    with refusing():
        saved = transformers.AutoConfig.from_pretrained(place(named))
    has_head = any("ForSequenceClassification" in name for name in saved.architectures or ())
    if job.label_options and job.model_name_or_path and has_head and saved.num_labels != job.num_labels:
        found = saved.num_labels
        raise ValueError(f"job.num_labels={job.num_labels}: {named} has {found}; set job.num_labels={found}")
    with refusing():
        config = transformers.AutoConfig.from_pretrained(place(named), **job.label_options)
        model = _without_memory(job, config)
    longest = getattr(config, "max_position_embeddings", None)
    longest = None if longest is None or longest < 1 else longest  # XLNet has -1: any number
    padded = [getattr(m, "padding_idx", None) for n, m in model.named_modules() if n.endswith("position_embeddings")]
    if longest is not None and padded and padded[0] is not None:  # as RoBERTa, which counts from the padding on
        longest -= padded[0] + 1
    if longest is not None and job.block_size > longest:
        raise ValueError(f"job.block_size={job.block_size}: the model has positions for {longest} tokens; lower it")
    tokens = len(job.tokenizer())
    if tokens > config.get_text_config().vocab_size:
        raise ValueError(
            f"job.tokenizer_name={job.tokenizer_name or 'null'}: the tokenizer has {tokens} tokens, but the model "
            f"knows only {config.get_text_config().vocab_size}; set it to the tokenizer of the model"
        )
    if job.peft is not None:
        _check_peft(job, model)
    if job.packing and (found := refusal(config, sum(p.numel() for p in model.parameters()))) is not None:
        raise ValueError(f"job.packing=true: {config.model_type}: {found}; set it to false")


def _without_memory(job: HuggingFace, config: Any) -> nn.Module:
    import transformers

    auto = getattr(transformers, AUTO_CLASSES[job.task])
    if not job.has_files:
        with torch.device("meta"):
            made: nn.Module = auto.from_config(config)
        return made
    made, missing = load_on_meta(auto, place(job.model_name_or_path), config)
    if missing:
        warnings.warn(
            f"job.model_name_or_path={job.model_name_or_path}: {len(missing)} weights are not in the files and "
            f"begin at random: {', '.join(missing)}",
            stacklevel=1,
        )
    return made


def _check_peft(job: HuggingFace, model: nn.Module) -> None:
    try:
        import peft  # noqa: F401
    except ImportError as e:
        raise ValueError(f"job.peft={job.peft}: peft is not installed: pip install peft") from e
    settings = job.peft_config()
    names = [name for name, _ in model.named_modules() if name]
    known = sorted({name.rpartition(".")[2] for name in names} - set(map(str, range(len(names)))))
    for option in ("target_modules", "modules_to_save"):
        for target in unmatched(job.peft_options.get(option), names):
            near = difflib.get_close_matches(target, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"job.peft_options.{option}={target}: the model has no such module; {hint}")
    try:
        with torch.device("meta"):
            with_adapters(model, settings)
    except ValueError as e:
        raise ValueError(f"job.peft_options={dict(job.peft_options)}: {first_sentence(e)}") from e


def _check_examples(job: HuggingFace, name: str) -> None:
    key = f"job.{name}={getattr(job, name)}"
    try:
        examples = job.examples(name)
        if isinstance(examples, Examples) and job.damaged == "refuse":
            _refuse_damaged(job, examples)
        looked_at = [examples[i] for i in range(min(LOOKED_AT, len(examples)))]
    except OSError as e:
        raise ValueError(f"{key}: cannot be read ({e.strerror})") from e
    except ValueError as e:
        raise ValueError(f"{key}: {str(e).removeprefix(f'{getattr(job, name)}, ')}") from e
    if isinstance(examples, Blocks):
        _check_tokens(job, key, examples.source)
    else:
        _warn_of_losses(job, key, examples)
    if not looked_at:
        raise ValueError(f"{key}: has no examples, or fewer tokens than job.block_size={job.block_size}")
    first = 1 if job.task in ("causal", "dpo") else 0  # nothing predicts the first token
    if job.task != "classification" and not any(bool((e["labels"][..., first:] != IGNORED).any()) for e in looked_at):
        these = "first example" if len(looked_at) == 1 else f"first {len(looked_at)} examples"
        raise ValueError(
            f"{key}: the loss counts no token of the {these}; prompts alone may be longer than "
            f"job.block_size={job.block_size}"
        )


def _refuse_damaged(job: HuggingFace, examples: Examples) -> None:
    if found := damaged(examples.rows, FIELDS[job.task], LOOKED_THROUGH):
        try:
            examples[found[0]]
        except ValueError as e:
            leaves = f"leaves out {len(found)} such examples" if len(found) > 1 else "leaves it out"
            raise ValueError(f"{e}; job.damaged=skip {leaves}") from e


def _warn_of_losses(job: HuggingFace, key: str, examples: Examples) -> None:
    rows, left_out = examples.rows, examples.left_out
    if left_out:
        named = "; ".join(rows.name(i) for i in left_out[:SHOWN_DAMAGED])
        warnings.warn(f"{key}: {len(left_out)} damaged examples are left out: {named}", stacklevel=1)
    tokenizer = job.tokenizer()
    longer = replace(job, block_size=job.block_size + 1).encoder(tokenizer)
    whole = Examples(rows, longer, left_out=left_out)
    looked_at = [whole[i] for i in range(min(LOOKED_AT, len(whole)))]
    of_first = f"of the first {len(looked_at)} examples"
    if cut := [e for e in looked_at if max(e["input_ids"].shape[-1:] + e["labels"].shape[-1:]) > job.block_size]:
        unlearned = sum(
            bool((e["labels"][..., : job.block_size] == IGNORED).all(dim=-1).any()) for e in cut if e["labels"].ndim
        )
        warnings.warn(
            f"{key}: {len(cut)} {of_first} have more than job.block_size={job.block_size} tokens, and are cut"
            + (f"; nothing of {unlearned} is learned, whose prompts fill it" if unlearned else ""),
            stacklevel=1,
        )
    _warn_of_ends(job, key, whole)
    kept = whole.kept[: len(looked_at)]
    if shortened := sum(leaves_out_text(tokenizer, rows.row(int(number))) for number in kept):
        warnings.warn(
            f"{key}: the chat template leaves out a text of {shortened} {of_first}, such as a system message or a "
            "chain of thoughts; messages are learned as the template writes them",
            stacklevel=1,
        )


def _warn_of_ends(job: HuggingFace, key: str, examples: Examples) -> None:
    """Warn of a chat whose answers end with another token than those at which the model ends an answer."""
    if not len(examples) or "messages" not in examples.rows.row(int(examples.kept[0])):
        return
    tokenizer, named = job.tokenizer(), str(job.model_name_or_path or job.config_name)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    labels = examples[0]["labels"].flatten().tolist()
    if len(labels) > job.block_size:
        return  # it may be cut
    last = next((token for token in reversed(labels[-2:]) if token in special), None)  # a line break may follow
    if last is None or last in ends_of(named, job.config, tokenizer):
        return
    warnings.warn(
        f"{key}: answers end with {tokenizer.convert_ids_to_tokens(last)!r}, at which the model does not stop: add "
        f"{last} to eos_token_id in generation_config.json of {named}",
        stacklevel=1,
    )


def _check_tokens(job: HuggingFace, key: str, source: Source) -> None:
    known, largest = len(job.tokenizer()), source.largest
    if largest is None:
        largest = int(source.tokens.max()) if len(source.tokens) else 0
    if largest >= known:
        raise ValueError(
            f"{key}: holds token {largest}, and the tokenizer has {known}; make the tokens with the tokenizer of "
            "the model"
        )
