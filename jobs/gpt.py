"""A decoder-only transformer language model, trained on tokens or on the bytes of a text, or fine-tuned.

    python -m orchestrator.launch job=gpt strategy=ddp job.path=my.txt
    python -m orchestrator.launch job=gpt strategy=ddp job.size=124m job.path=[train.bin] job.val_path=[val.bin]
    python -m orchestrator.launch job=gpt strategy=ddp job.weights=my-llama job.path=[train.bin]

``jobs/transformer.py`` is the model, ``jobs/tokens.py`` the data, ``jobs/pretrained.py`` reads weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import has_torch_function
from torch.utils.data import Dataset

from jobs.pretrained import CONFIG, architecture_of, check_weights, load, load_theirs, save, save_tokenizer
from jobs.tokens import BYTES, IGNORED, TOKEN_SUFFIXES, Documents, Source, Windows, help_texts, open_source
from jobs.transformer import SIZES, Architecture, Size, Variant, transformer
from orchestrator.job import Job, Split

VAL_PERCENT = 10
FINAL_LR = 0.1
"""The learning rate at the end of a decay, relative to ``lr``."""
LONGEST_DEFAULT = 2048
"""The tokens of a sample if neither ``context`` nor ``size`` says, since published models see up to 131,072."""
WSD_DECAY = 0.2
"""The part of the steps in which ``schedule=wsd`` decays."""
SCANNED_TOKENS = 2**28
"""Files of up to this many tokens are looked through for unknown ones before training."""
LOSS_ELEMENTS = 2**24
"""The number of logits from which on the loss is computed in chunks of at most as many."""

Codec = tuple[Callable[[str], list[int]], Callable[[list[int]], str]]
"""From a text to its tokens, and back."""


@dataclass(frozen=True, kw_only=True)
class GPT(Job):
    """A language model with the architecture of GPT-2 or of Llama, at a published size.

    AdamW trains it, with weight decay for matrices only.

    Attributes:
        size: sets each of the fields from ``variant`` to ``tied`` that is None.
        context: the tokens of a sample.
        weights: a directory of Hugging Face (GPT-2 or Llama, safetensors) to start from. It sets the size, too.
        path: one or several files of tokens (``.npy``; ``.bin`` of ``dtype``) or texts, whose tokens are their bytes.
            None for the help texts that Python ships in ``pydoc_data.topics``.
        path_weights: the proportions in which the files are drawn.
        val_path: the files that are held out; None to hold out the last tenth of each file of ``path``.
        end_token: the token between documents; None for one long text.
        documents: ``packed`` fills samples with documents, which do not see each other if there is an ``end_token``.
            ``padded`` gives each document samples of its own.
        tokenizer: a ``tokenizer.json`` for texts that the model writes (``pip install tokenizers``); None for bytes.
        schedule: what follows the warm-up. ``cosine`` decays the rate to a tenth of ``lr`` over the rest of the steps,
            ``wsd`` (https://arxiv.org/abs/2404.06395) over the last fifth.
        sample_tokens: how many tokens the model writes after an evaluation and at the end.
        temperature: the temperature at which these tokens are drawn.
    """

    export_formats: ClassVar[tuple[str, ...]] = ("hf",)

    size: Size = "tiny"
    variant: Variant | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    context: int | None = None
    vocabulary: int | None = None
    tied: bool | None = None
    dropout: float = 0.0
    weights: str | None = None
    path: str | tuple[str, ...] | None = None
    path_weights: tuple[float, ...] | None = None
    val_path: str | tuple[str, ...] | None = None
    dtype: Literal["uint16", "uint32"] = "uint16"
    end_token: int | None = None
    documents: Literal["packed", "padded"] = "packed"
    tokenizer: str | None = None
    lr: float = 3e-3
    weight_decay: float = 0.1
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 20
    sample_tokens: int = 200
    temperature: float = 0.8

    def model(self) -> nn.Module:
        a = self.architecture()
        model = transformer(a)
        if self.weights is not None:
            load(model, a, Path(self.weights).expanduser())
        return model

    @classmethod
    def fields_to_evaluate(cls, paths: Sequence[str]) -> Mapping[str, Any]:
        return {"path": paths, "path_weights": None, "val_path": paths}

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, Tensor]]:
        return self._samples(split)

    def sample_weights(self, split: Split) -> Tensor | None:
        if self.path_weights is None:
            return None
        counts = torch.tensor(self._samples(split).counts)
        return torch.repeat_interleave(torch.tensor(self.path_weights) / counts, counts)

    def positioned(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        logits, labels = output.flatten(0, 1), target.flatten()
        if logits.numel() <= LOSS_ELEMENTS or has_torch_function((logits,)):  # which may be divided over workers
            return F.cross_entropy(logits, labels)
        rows = max(1, LOSS_ELEMENTS // logits.shape[1])
        loss: Tensor = ChunkedCrossEntropy.apply(logits, labels, rows)
        return loss

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in parameters:
            (matrices if parameter.dim() > 1 else others).append(parameter)
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        decay_from = {"cosine": self.warmup_steps, "wsd": int(steps * (1 - WSD_DECAY)), "constant": steps}[
            self.schedule
        ]

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / (self.warmup_steps + 1)
            progress = min(1.0, max(0.0, (step - decay_from) / max(1, steps - decay_from)))
            left = (1 + math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else 1 - progress
            return FINAL_LR + (1 - FINAL_LR) * left

        return LambdaLR(optimizer, factor)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        correct = (output.argmax(dim=-1) == target).float()
        # By token if weight() counts tokens, and otherwise by sample: its fraction of correct ones.
        return {"accuracy": correct.sum() if self.documents == "padded" else correct.mean(dim=-1).sum()}

    def weight(self, target: Tensor) -> Tensor | None:
        return (target != IGNORED).sum() if self.documents == "padded" else None

    @property
    def tokens_per_sample(self) -> int:
        return self.context or min(self.architecture().context, LONGEST_DEFAULT)

    @property
    def reports_perplexity(self) -> bool:
        return True

    @property
    def draws_samples(self) -> bool:
        has_codec = self.tokenizer is not None or self.architecture().vocabulary == BYTES
        return self.sample_tokens > 0 and has_codec

    def sample(self, model: nn.Module, generator: torch.Generator) -> str | None:
        """Generate ``sample_tokens`` tokens after a newline, or the ``end_token``; None without a codec for them."""
        codec = self._codec()
        if codec is None:
            return None
        encode, decode = codec
        context = self.tokens_per_sample
        device = next(model.parameters()).device
        start = encode("\n") if self.end_token is None else [self.end_token]
        text = torch.tensor([start], device=device)
        for _ in range(self.sample_tokens):
            logits = model(text[:, -context:])[0, -1].float() / self.temperature
            probabilities = logits.softmax(dim=-1).to(generator.device)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            text = torch.cat([text, drawn.to(device)[None]], dim=1)
        return decode(text[0, len(start) :].tolist())

    def export(self, weights: Mapping[str, Tensor], directory: Path, format: str) -> None:
        origin = None if self.weights is None else Path(self.weights).expanduser()
        save(weights, replace(self.architecture(), end_token=self.end_token), directory, origin=origin)
        if self.tokenizer is not None:
            save_tokenizer(Path(self.tokenizer).expanduser(), directory, end_token=self.end_token)

    def exported(self, directory: Path, format: str) -> nn.Module:
        return load_theirs(directory)

    def example_inputs(self) -> Tensor:
        a = self.architecture()
        return torch.randint(a.vocabulary, (2, a.context))

    def architecture(self) -> Architecture:
        """Return the sizes of the model.

        Raises:
            OSError: ``weights`` cannot be read.
            ValueError: ``weights`` holds another kind of model, or a field contradicts it or another.
        """
        if self.weights is not None:
            return self._architecture_of_weights(Path(self.weights).expanduser())
        base = SIZES[self.size]
        variant, width = self.variant or base.variant, self.width or base.width
        heads = self.heads or base.heads
        hidden = base.hidden * width // base.width
        if variant == "llama" and base.variant == "gpt2":
            hidden = hidden * 2 // 3  # as many weights as without the gate
        text = not any(map(_holds_tokens, _paths(self.path)))
        return replace(
            base,
            variant=variant,
            vocabulary=self.vocabulary or (BYTES if text else base.vocabulary),
            context=self.context or base.context,
            layers=self.layers or base.layers,
            width=width,
            heads=heads,
            kv_heads=self.kv_heads or max(1, heads * base.kv_heads // base.heads),
            hidden=self.hidden or hidden,
            tied=base.tied if self.tied is None else self.tied,
            bias=base.bias and variant == "gpt2",
            dropout=self.dropout,
            end_token=self._seen_end_token,
        )

    @property
    def _seen_end_token(self) -> int | None:
        """The token at which the model keeps documents apart; None if no sample has several."""
        return self.end_token if self.documents == "packed" else None

    def check(self) -> None:
        least = {"layers": 1, "width": 1, "heads": 1, "kv_heads": 1, "hidden": 1, "context": 1, "vocabulary": 2}
        least |= {"warmup_steps": 0, "sample_tokens": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"job.{name}={value}: must be at least {minimum}")
        if self.end_token is not None and not 0 <= self.end_token < self.architecture().vocabulary:
            vocabulary = self.architecture().vocabulary
            raise ValueError(f"job.end_token={self.end_token}: the model knows the tokens from 0 to {vocabulary - 1}")
        if self.documents == "padded" and self.end_token is None:
            raise ValueError("job.documents=padded: needs job.end_token, the token after each document")
        for name in ("lr", "temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"job.{name}={getattr(self, name):g}: must be greater than 0")
        if self.weight_decay < 0:
            raise ValueError(f"job.weight_decay={self.weight_decay:g}: must be at least 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"job.dropout={self.dropout:g}: must be in [0, 1)")
        a = self.architecture()
        if a.width % a.heads:
            raise ValueError(f"job.width={a.width}: must be a multiple of job.heads={a.heads}")
        if a.heads % a.kv_heads:
            raise ValueError(f"job.kv_heads={a.kv_heads}: must divide job.heads={a.heads}")
        if a.variant == "llama" and a.width // a.heads % 2:
            raise ValueError(f"job.heads={a.heads}: job.width={a.width} over it must be even, for rotary positions")
        if self.weights is not None:
            try:
                check_weights(a, Path(self.weights).expanduser())
            except (OSError, ValueError) as e:
                raise ValueError(f"job.weights={self.weights}: {e}") from e
        if self.path_weights is not None:
            if len(self.path_weights) != len(_paths(self.path)):
                raise ValueError(f"job.path_weights={list(self.path_weights)}: give one number for each of job.path")
            if min(self.path_weights) < 0 or not 0 < sum(self.path_weights) < math.inf:
                raise ValueError(f"job.path_weights={list(self.path_weights)}: must be at least 0, and one above 0")
        self._codec()
        self._check_tokens("path", a.vocabulary)
        self._check_tokens("val_path", a.vocabulary)

    def _check_tokens(self, field: Literal["path", "val_path"], vocabulary: int) -> None:
        for source in self._sources(field):
            if self.end_token is not None and source.end_token not in (None, self.end_token):
                raise ValueError(
                    f"job.end_token={self.end_token}: the documents in {source.name} end with {source.end_token}; set "
                    f"job.end_token={source.end_token}"
                )
            largest = source.largest
            if largest is None and len(source.tokens) <= SCANNED_TOKENS:
                largest = int(source.tokens.max())
            if largest is not None and largest >= vocabulary:
                raise ValueError(
                    f"job.{field}={source.name}: holds token {largest}, but the model knows only {vocabulary}; set "
                    f"job.vocabulary={source.vocabulary or largest + 1}, or job.dtype as it was written, or make the "
                    "tokens with the tokenizer of the model"
                )

    def _architecture_of_weights(self, directory: Path) -> Architecture:
        key = f"job.weights={self.weights}"
        try:
            a = replace(architecture_of(directory, dropout=self.dropout), end_token=self._seen_end_token)
        except (OSError, ValueError, KeyError) as e:
            reason = f"{CONFIG}: has no {e.args[0]}" if isinstance(e, KeyError) else e
            raise ValueError(f"{key}: {reason}; set it to a directory of Hugging Face with a GPT-2 or a Llama") from e
        for name in ("variant", "layers", "width", "heads", "kv_heads", "hidden", "vocabulary", "tied"):
            wanted, found = getattr(self, name), getattr(a, name)
            if wanted is not None and wanted != found:
                raise ValueError(f"job.{name}={wanted}: the model of {key} has {found}; leave it out")
        if a.variant == "gpt2" and (self.context or 0) > a.context:
            raise ValueError(f"job.context={self.context}: {key} has positions for {a.context} tokens; lower it")
        if not all(map(_holds_tokens, _paths(self.path) or ["null"])):
            raise ValueError(f"{key}: its tokens are not bytes; set job.path to .bin or .npy files of its tokenizer")
        return a

    def _samples(self, split: Split) -> Windows | Documents:
        held_out, parts = self.val_path is None, []
        for source in self._sources("val_path" if split == "val" and not held_out else "path"):
            train, val = source.split(VAL_PERCENT if held_out else 0)
            parts.append(val if split == "val" and held_out else train)
        if self.documents == "padded":
            assert self.end_token is not None
            return Documents(parts, context=self.tokens_per_sample, end_token=self.end_token)
        return Windows(parts, context=self.tokens_per_sample, vocabulary=self.architecture().vocabulary)

    def _sources(self, field: Literal["path", "val_path"]) -> Sequence[Source]:
        """Open the files of a field.

        Raises:
            ValueError: one cannot be read, or is shorter than a sample; the text says what to change.
        """
        sources = []
        for path in _paths(getattr(self, field)):
            try:
                sources.append(open_source(Path(path).expanduser(), dtype=self.dtype))
            except (OSError, ValueError) as e:
                reason = f"cannot be read ({e.strerror})" if isinstance(e, OSError) else str(e)
                raise ValueError(f"job.{field}={path}: {reason}; set it to a text, or to tokens") from e
        if not sources and field == "path":
            sources = [help_texts()]
        least = (self.tokens_per_sample + 1) * (100 // VAL_PERCENT if self.val_path is None else 1)
        for source in sources:
            if len(source.tokens) < least:
                raise ValueError(
                    f"job.{field}={source.name}: has {len(source.tokens)} tokens, but job.context="
                    f"{self.tokens_per_sample} needs {least}; use a longer one or lower job.context"
                )
        return sources

    def _codec(self) -> Codec | None:
        """Return how texts become tokens and tokens texts; None without a tokenizer."""
        if self.tokenizer is None:
            if self.architecture().vocabulary != BYTES:
                return None
            return lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace")
        key = f"job.tokenizer={self.tokenizer}"
        try:
            from tokenizers import Tokenizer
        except ImportError as e:
            raise ValueError(f"{key}: tokenizers is not installed: pip install tokenizers") from e
        try:
            tokenizer = Tokenizer.from_file(str(Path(self.tokenizer).expanduser()))
        except Exception as e:  # it raises nothing more special
            raise ValueError(f"{key}: {e}; set it to a tokenizer.json") from e
        tokenizer.no_truncation()  # a saved tokenizer may cut texts and fill them up
        tokenizer.no_padding()
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.decode


class ChunkedCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of the labels that are not ignored, computed for some rows at a time.

    It keeps the gradient of the logits, in their type, in place of several tensors of the same size in float32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: int) -> Tensor:
        """Return the mean over the rows of ``logits``, of shape (rows, classes); ``rows`` at a time."""
        gradient = torch.empty_like(logits) if logits.requires_grad else None
        total = torch.zeros((), device=logits.device)
        counted = (labels != IGNORED)[:, None]
        count = counted.sum()
        for start in range(0, len(logits), rows):
            part, wanted = logits[start : start + rows].float(), labels[start : start + rows, None].clamp(min=0)
            counts = counted[start : start + rows]
            log_probabilities = part.log_softmax(dim=-1)
            total -= (log_probabilities.gather(1, wanted) * counts).sum()
            if gradient is not None:
                slope = log_probabilities.exp_()
                slope.scatter_add_(1, wanted, -torch.ones_like(slope[:, :1]))
                gradient[start : start + rows] = slope * counts / count
        ctx.save_for_backward(gradient)
        return total / count

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient.to(gradient.dtype), None, None


def _paths(paths: str | Sequence[str] | None) -> Sequence[str]:
    return [paths] if isinstance(paths, str) else paths or []


def _holds_tokens(path: str) -> bool:
    return Path(path).suffix in TOKEN_SUFFIXES
