"""Whether the ranks of a run train the model that one worker would train: compared before the first step.

A few real samples go through the passes, the sums and an evaluation of the strategy, as in training, and through the
whole model on the first rank. Loss, norm, evaluation, the gradient of every parameter and all buffers that have changed
must be equal, up to rounding. Where something differs, it is measured what rounding does to the model: what becomes of
the same if the weights of the whole model are rounded otherwise.

Both have the values that the ranks have. Parameters of nothing but zeros get small numbers for this, because what they
multiply would not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_generators
from orchestrator.compat.process_groups import is_broken_connection
from orchestrator.compat.torch import as_bytes, eager
from orchestrator.model.batch import tensors_in
from orchestrator.model.failed_call import error_with_place
from orchestrator.model.proofs.proving import TOLERANCE
from orchestrator.model.repeatable_passes import ExpectedNumbers
from orchestrator.model.values_on_demand import ChangedValueError
from orchestrator.planning.placement import Box
from orchestrator.state.transport import CPU, broadcast_json, broadcast_tensors, gather_json
from orchestrator.strategies.base import Compared
from orchestrator.strategies.data.batch_parts import spread
from orchestrator.strategies.data.datasets import make_batch
from orchestrator.strategies.findings import (
    FACTOR,
    Apart,
    apart_from,
    difference,
    figure_apart,
    figures_of,
    text_of,
)
from orchestrator.strategies.measure.device import free_memory
from orchestrator.strategies.undivided import (
    EVALUATION,
    LOSS,
    NORM,
    Batches,
    CutShortError,
    Passed,
    Undivided,
    sums_of,
)
from orchestrator.strategies.whole_exchange import Exchange, Gradients
from orchestrator.user_code.errors import JobError, error_text, is_own_error

if TYPE_CHECKING:
    from orchestrator.strategies.compared_trainer import ComparedTrainer

REPLICAS = 2
"""The most replicas whose samples differ."""
ROUNDINGS = 2
"""How often the weights are rounded otherwise."""
RANDOM = 1e-3
"""What random numbers change at least, where another order of sums changes less."""
SMALL = 0.02
"""The largest number in place of a zero."""


def compare_with_whole(
    trainer: ComparedTrainer,
    train_set: Any,
    *,
    known: Callable[[str], bool],
    is_cut: Callable[[], bool],
    most_bytes: int | None = None,
) -> Compared:
    """Compare the passes of the ranks with those of the whole model. Collective. The ranks are left as they were.

    Args:
        trainer: of this rank, whose state is that of all ranks.
        train_set: the samples.
        known, is_cut: see :meth:`Strategy.compare_with_whole`.
        most_bytes: the memory of the first rank for the whole model; None for half of what is free.

    Raises:
        JobError: the ranks train another model; the text says what differs.
    """
    context = trainer.context
    model = _made_of(trainer.trained.modules) if context.global_rank == 0 else None
    if broadcast_json(model is not None and known(model), source=0, rank=context.global_rank, device=context.device):
        return Compared()
    compiled = trainer.context.train.compile is not False
    with eager() if compiled else contextlib.nullcontext(), trainer.comparing() as restore:
        notes = _Comparison(trainer, restore, is_cut, most_bytes).made(train_set)
    return Compared(notes=notes, model=None if notes else model)


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """The whole model on the first rank, and what its passes have computed."""

    undivided: Undivided
    passed: Passed

    def header(self) -> dict[str, Any]:
        """Return what all ranks have to know of it, as JSON."""
        buffers = [[name, *_likeness(buffer)] for name, buffer in self.passed.buffers.items()]
        return {"watched": self.passed.drew or bool(self.passed.dtypes), "buffers": buffers}


class _Comparison:
    def __init__(
        self,
        trainer: ComparedTrainer,
        restore: Callable[[], None],
        is_cut: Callable[[], bool],
        most_bytes: int | None,
    ):
        self._trainer = trainer
        self._restore = restore
        self._is_cut = is_cut
        self._context = context = trainer.context
        self._rank, self._seed, self._most_bytes = context.global_rank, context.seed, most_bytes
        self._exchange = Exchange(trainer)
        self._zeros: Sequence[str] = ()

    def made(self, train_set: Any) -> tuple[str, ...]:
        """Make the comparison; see :func:`compare_with_whole`."""
        batches, error = None, None
        try:
            batches = _batches(self._trainer, train_set)
        except Exception as e:  # training reads other samples, or says what is wrong with these
            error = error_text(e)
        own = self._exchange.parameters
        values = [name for name, parameter in own.items() if bool(parameter.detach().any())]
        read = None if batches is None else _digest(batches)
        listed = self._exchange.listed()
        errors, ranks, with_values, all_read = zip(*self._gathered([error, listed, values, read]), strict=True)
        self._exchange.use(ranks)
        found = {name for names in with_values for name in names}
        self._zeros = [name for name in own if name not in found]
        other = "the workers read other samples, although they were seeded alike" if len({*all_read}) > 1 else None
        if (reason := next(filter(None, errors), None) or other) is not None:
            return self._note(reason)
        assert batches is not None
        return self._compared(batches)

    def _compared(self, batches: Batches) -> tuple[str, ...]:
        self._begin()
        reference: _Reference | None = None
        if self._rank == 0:
            found = self._reference(batches)
            reference = None if isinstance(found, str) else found
            answer = self._exchange.end(found if isinstance(found, str) else found.header())
        else:
            answer = self._exchange.follow()
        self._trainer.hooks.confirm()
        if isinstance(answer, str):
            return self._note(answer)
        sums, dtypes = self._passes(batches, watched=answer["watched"])
        gradients = self._exchange.compared()
        buffers = self._buffers_apart(answer["buffers"], None if reference is None else reference.passed.buffers)
        ranks = self._gathered({"buffers": buffers, "dtypes": dtypes, **sums})
        self._begin()
        if reference is None:
            text, note = self._exchange.follow()
        else:
            text, note = self._exchange.end(self._verdict(reference, batches, gradients, ranks))
        if text is not None:
            raise JobError(text)
        return () if note is None else self._note(note)

    def _begin(self) -> None:
        """Begin passes with the state of the run, but for the zeros. Collective."""
        self._restore()
        with torch.no_grad():
            for name in self._zeros:
                if (box := self._exchange.boxes.get(name)) is not None:
                    self._exchange.parameters[name].copy_(_small_numbers(box))
        self._trainer.share_parameters()
        seed_generators(self._seed)

    def _reference(self, batches: Batches) -> _Reference | str:
        """Return the whole model and what its passes compute, or why nothing is compared."""
        trainer, most = self._trainer, self._most_bytes
        if most is None:
            most = min(free_memory(device) // 2 for device in (CPU, self._context.device))
        try:
            undivided = Undivided(
                trainer.job, self._context, trainer.precision, self._exchange, is_cut=self._is_cut, most_bytes=most
            )
            passed = undivided.passed(batches, seed=self._seed)
        except CutShortError as e:
            return str(e)
        except ChangedValueError as e:
            return f"{e}, and the first worker has no room for the whole model with its gradients"
        except Exception as e:  # if training cannot do it either, it says so
            if is_broken_connection(e) or self._exchange.interrupted:
                raise
            return f"on one worker, it fails ({error_with_place(e)})"
        if not all(math.isfinite(passed.figures.get(name, 0.0)) for name in (LOSS, NORM)):
            return "its loss or its gradient is not finite"
        return _Reference(undivided=undivided, passed=passed)

    def _passes(self, batches: Batches, *, watched: bool) -> tuple[dict[str, dict[str, float]], list[str]]:
        """Make the passes of this rank, and leave its gradients and buffers in place.

        Args:
            watched: whether random numbers are replaced, and the types of results seen.

        Returns:
            This rank's part of the figures, and the 16-bit types in which it has computed something.

        Raises:
            JobError: they fail, although those of the whole model do not.
        """
        trainer, own = self._trainer, self._context.dp_rank

        def read() -> list[Any]:
            return [batch if trainer.traits.reads_data else None for batch in batches.of(own)]

        numbers = ExpectedNumbers(communicates=True)
        train: dict[str, float] = {}
        try:
            with numbers if watched else contextlib.nullcontext():
                evaluation = sums_of(trainer.evaluate(read()[0], batches.rows))
                self._begin()
                loss_sum, weight, norm = trainer.pass_once(read(), batches)
                train = {LOSS: float(loss_sum), "weight": float(weight)} if self._context.counts_samples else {}
                train[NORM] = float(norm)
            trainer.hooks.confirm()
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            if is_broken_connection(e) or is_own_error(e):
                raise
            traceback.print_exc()  # into the log of the rank
            reason = error_with_place(e)
            raise JobError(
                f"{trainer.divided_by}: the model fails as the workers compute it ({reason}), and not on one worker. "
                f"{trainer.remedy}"
            ) from e
        return {"train": train, EVALUATION: evaluation}, [str(dtype).removeprefix("torch.") for dtype in numbers.dtypes]

    def _buffers_apart(
        self, listed: Sequence[tuple[str, Sequence[int], str]], expected: Mapping[str, Tensor] | None
    ) -> dict[str, float]:
        """Compare buffers with those of the whole model. Collective.

        Args:
            listed: name, shape and dtype of each.
            expected: those of the first rank, on that rank.

        Returns:
            How they differ, by name.
        """
        wanted = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._context.device)
            for name, shape, dtype in listed
        }
        if expected is not None:
            wanted = {name: expected[name].to(self._context.device) for name in wanted}
        broadcast_tensors(wanted.values(), source=0, device=self._context.device)
        self._trainer.hooks.confirm()
        own = dict(self._trainer.trained.module().named_buffers(remove_duplicate=False))
        return {name: difference(own[name].to(whole.device), whole) for name, whole in wanted.items() if name in own}

    def _verdict(
        self,
        reference: _Reference,
        batches: Batches,
        gradients: Gradients | None,
        ranks: Sequence[Mapping[str, Any]],
    ) -> tuple[str | None, str | None]:
        """Return the error about what differs, and what was not compared; None for each that there is not."""
        expected, figures = reference.passed, figures_of(ranks)
        worst = {("gradient", name): by for name, by in (gradients.differences if gradients else {}).items()}
        for name, by in itertools.chain.from_iterable(rank["buffers"].items() for rank in ranks):
            worst["buffer", name] = max(by, worst.get(("buffer", name), 0.0))
        for name, wanted in expected.figures.items():
            if math.isfinite(wanted):  # of an evaluation, at values that no step has changed
                worst["figure", name] = figure_apart(figures.get(name), wanted)
        apart = [Apart(kind=kind, name=name, by=by) for (kind, name), by in worst.items() if not by <= TOLERANCE]
        if not apart:
            return None, None
        try:
            dtypes = {getattr(torch, name) for rank in ranks for name in rank["dtypes"]}
            apart, drawn = self._beyond_rounding(reference, batches, apart, dtypes)
        except CutShortError as e:
            return None, str(e)
        note = "it draws random numbers, so only what does not depend on them was" if drawn else None
        # What makes another gradient of the parts of a batch may do so too of those that DDP weighs otherwise.
        trainer = self._trainer
        warned = not trainer.traits.divides_model and any(
            remark.kind == "otherwise" for remark in trainer.setup_warnings()
        )
        if not apart or warned:
            return None, note
        text = text_of(
            apart,
            reference.undivided.model,
            by=self._trainer.divided_by,
            remedy=self._trainer.remedy,
            samples=batches.samples,
            figures=figures,
            expected=expected.figures,
        )
        return text, None

    def _beyond_rounding(
        self, reference: _Reference, batches: Batches, apart: Sequence[Apart], dtypes: Collection[torch.dtype]
    ) -> tuple[list[Apart], bool]:
        """Return what differs by more than rounding, or random numbers, explain, and whether there are such numbers.

        ``dtypes``: the 16-bit types in which ranks compute. What only one worker computes in them is not rounding.
        """

        def changes(**how: Any) -> list[float]:
            passed = reference.undivided.passed(batches, **how)
            return [apart_from(reference.passed, passed, one) for one in apart]

        drawn = changes(seed=self._seed + 1)
        both = [*self._trainer.compared_dtypes, *(dtype for dtype in reference.passed.dtypes if dtype in dtypes)]
        unit = max(torch.finfo(dtype).eps for dtype in both) / 2
        rounded = [changes(seed=self._seed, rounding=unit * (1 + number)) for number in range(ROUNDINGS)]
        least = FACTOR * unit if unit > TOLERANCE else 0.0  # sums in 16 bits round, whatever the weights are
        limits = [
            max(least if one.is_gradient else 0.0, FACTOR * max(changed))
            for one, *changed in zip(apart, drawn, *rounded, strict=True)
        ]
        return [one for one, limit in zip(apart, limits, strict=True) if not one.by <= limit], max(drawn) > RANDOM

    def _note(self, reason: str) -> tuple[str, ...]:
        text = f"{self._trainer.divided_by}: what the workers compute was not compared with the whole model: {reason}"
        return (text,) if self._rank == 0 else ()

    def _gathered(self, value: Any) -> list[Any]:
        found = gather_json(value, world_size=self._context.mesh.world_size, device=self._context.device)
        self._trainer.hooks.confirm()
        return found


def _made_of(models: Sequence[nn.Module]) -> str:
    """Return the modules of models with their numbers and flags, which may come from files that the job reads."""
    parts = [
        (name, type(module).__qualname__, {n: v for n, v in vars(module).items() if isinstance(v, (int, float, str))})
        for model in models
        for name, module in model.named_modules()
    ]
    shapes = [(name, [*p.shape], str(p.dtype)) for model in models for name, p in model.named_parameters()]
    return hashlib.blake2b(repr((parts, shapes)).encode(), digest_size=16).hexdigest()


def _batches(trainer: ComparedTrainer, train_set: Any) -> Batches:
    """Return samples from all over a data set, the same on all ranks."""
    context, (slices, rows, parts) = trainer.context, trainer.compared_slices
    size = context.mesh.data_parallel_size
    different = min(size, REPLICAS)
    with kept_generators(context.device):
        seed_generators(context.seed)
        items = spread(train_set, different * slices * rows)
        turn = itertools.cycle(items)
        made = [
            [trainer.on_device(make_batch(trainer.job.collate, [*itertools.islice(turn, rows)])) for _ in range(slices)]
            for _ in range(different)
        ]
    counts = [len(range(number, size, different)) for number in range(different)]
    return Batches(replicas=made, counts=counts, rows=rows, parts=parts, together=trainer.compares_together)


def _digest(batches: Batches) -> str:
    """Return a hash of the tensors in a batch."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(batches.replicas):
        if tensor.layout is torch.strided:
            digest.update(bytes(as_bytes(tensor.detach().cpu().contiguous()).numpy()))
    return digest.hexdigest()


def _small_numbers(box: Box) -> Tensor:
    """Return numbers for a part of a tensor, which depend on their places in the whole."""
    phase = torch.ones((), dtype=torch.float64)
    for axis, ranges in enumerate(box.ranges):
        places = torch.cat([torch.arange(start, start + size, dtype=torch.float64) for start, size in ranges])
        phase = phase + ((axis + 2) ** 0.5 * places).view(-1, *[1] * (len(box.ranges) - axis - 1))
    return SMALL * phase.square().sin()


def _likeness(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
