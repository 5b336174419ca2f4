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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_generators
from orchestrator.compat.process_groups import is_broken_connection
from orchestrator.compat.torch import as_bytes, eager
from orchestrator.model.batch import tensors_in
from orchestrator.model.proving import TOLERANCE
from orchestrator.model.repeatable_passes import ExpectedNumbers
from orchestrator.planning.memory import size_text
from orchestrator.planning.placement import Box
from orchestrator.state.transport import CPU, broadcast_json, broadcast_tensors, gather_json, messages_of
from orchestrator.strategies.base import Compared
from orchestrator.strategies.data.batch_parts import OTHERWISE, spread
from orchestrator.strategies.data.datasets import make_batch
from orchestrator.strategies.findings import (
    FACTOR,
    Apart,
    apart_from,
    difference,
    figure_apart,
    figures_of,
    largest_of,
    text_of,
)
from orchestrator.strategies.measure.device import free_memory
from orchestrator.strategies.undivided import EVALUATION, LOSS, NORM, Batches, Passed, Undivided, dense, sums_of
from orchestrator.user_code.errors import JobError, error_text, is_own_error

if TYPE_CHECKING:
    from orchestrator.strategies.compared_trainer import ComparedTrainer

REPLICAS = 2
"""The most replicas whose samples differ."""
COPIES = 4
"""The whole model, its gradients, and what is kept of both."""
ROUNDINGS = 2
"""How often the weights are rounded otherwise."""
RANDOM = 1e-3
"""What random numbers change at least, where another order of sums changes less."""
SMALL = 0.02
"""The largest number in place of a zero."""


def compare_with_whole(trainer: ComparedTrainer, train_set: Any, *, known: Callable[[str], bool]) -> Compared:
    """Compare the passes of the ranks with those of the whole model. Collective. The ranks are left as they were.

    Args:
        trainer: of this rank, whose state is that of all ranks.
        train_set: the samples.
        known: see :meth:`Strategy.compare_with_whole`.

    Raises:
        JobError: the ranks train another model; the text says what differs.
    """
    context = trainer.context
    model = _made_of(trainer.trained.modules) if context.global_rank == 0 else None
    if broadcast_json(model is not None and known(model), source=0, rank=context.global_rank, device=context.device):
        return Compared()
    compiled = trainer.context.train.compile is not False
    with eager() if compiled else contextlib.nullcontext(), trainer.comparing() as restore:
        notes = _Comparison(trainer, restore).made(train_set)
    return Compared(notes=notes, model=None if notes else model)


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """The whole model on the first rank, and what its passes have computed."""

    undivided: Undivided
    passed: Passed

    def header(self, *, trains: bool) -> dict[str, Any]:
        """Return what all ranks have to know of it, as JSON."""
        model, aliases = self.undivided.model, self.undivided.aliases
        return {
            "trains": trains,
            "drew": self.passed.drew,
            "scale": largest_of(self.passed.gradients),
            "gradients": [[aliases[n], *_likeness(p)] for n, p in model.named_parameters() if p.requires_grad],
            "buffers": [[[name], *_likeness(buffer)] for name, buffer in self.passed.buffers.items()],
        }


class _Comparison:
    def __init__(self, trainer: ComparedTrainer, restore: Callable[[], None]):
        self._trainer = trainer
        self._restore = restore
        self._context = context = trainer.context
        self._mesh, self._rank, self._seed = context.mesh, context.global_rank, context.seed
        self._trains = trainer.compares_training
        self._parameters = dict(trainer.trained.module().named_parameters(remove_duplicate=False))
        self._zeros: Sequence[str] = ()

    def made(self, train_set: Any) -> tuple[str, ...]:
        """Make the comparison; see :func:`compare_with_whole`."""
        batches, error = None, None
        try:
            batches = _batches(self._trainer, train_set)
        except Exception as e:  # training reads other samples, or says what is wrong with these
            error = error_text(e)
        own = self._trainer.trained.module().named_parameters()
        size = sum(parameter.nbytes for name, parameter in own if self._trainer.is_first_with(name))
        values = [name for name, p in self._parameters.items() if bool(p.detach().any())]
        read = None if batches is None else _digest(batches)
        errors, sizes, with_values, all_read = zip(*self._gathered([error, size, values, read]), strict=True)
        found = {name for names in with_values for name in names}
        self._zeros = [name for name in self._parameters if name not in found]
        other = "the workers read other samples, although they were seeded alike" if len({*all_read}) > 1 else None
        reason = self._broadcast(next(filter(None, errors), None) or other or self._why_too_large(sum(sizes)))
        if reason is not None:
            return self._note(reason)
        assert batches is not None
        return self._compared(batches)

    def _compared(self, batches: Batches) -> tuple[str, ...]:
        self._begin()
        values = self._trainer.whole_values()
        reference, answer = None, None
        if self._rank == 0:
            assert values is not None
            reference, answer = self._reference(batches, values)
        answer = self._broadcast(answer)
        if isinstance(answer, str):
            return self._note(answer)
        sums = self._passes(batches, drew=answer["drew"])
        apart = self._apart(answer, None if reference is None else reference.passed)
        ranks = self._gathered({"apart": apart, **sums})
        text, note = self._broadcast(None if reference is None else self._verdict(reference, batches, ranks))
        if text is not None:
            raise JobError(text)
        return () if note is None else self._note(note)

    def _begin(self) -> None:
        """Begin passes with the state of the run, but for the zeros. Collective."""
        self._restore()
        with torch.no_grad():
            for name in self._zeros:
                if (box := self._box(name)) is not None:
                    self._parameters[name].copy_(_small_numbers(box))
        self._trainer.share_parameters()
        seed_generators(self._seed)

    def _why_too_large(self, size: int) -> str | None:
        limit = min(free_memory(device) // 2 for device in (CPU, self._context.device))
        if COPIES * size <= limit:
            return None
        return f"the first worker would need {size_text(COPIES * size)} for it, more than {size_text(limit)}"

    def _reference(
        self, batches: Batches, values: Mapping[str, Tensor]
    ) -> tuple[_Reference | None, dict[str, Any] | str]:
        """Return the whole model, and what all ranks have to know of it, or why nothing is compared."""
        trainer = self._trainer
        try:
            undivided = Undivided(trainer.job, self._context, trainer.precision, values)
            passed = undivided.passed(batches, trains=self._trains, seed=self._seed)
        except Exception as e:  # if training cannot do it either, it says so
            return None, f"on one worker, it fails ({' '.join(error_text(e).split())[:300]})"
        if not all(math.isfinite(passed.figures.get(name, 0.0)) for name in (LOSS, NORM)):
            return None, "its loss or its gradient is not finite"
        reference = _Reference(undivided=undivided, passed=passed)
        return reference, reference.header(trains=self._trains)

    def _passes(self, batches: Batches, *, drew: bool) -> dict[str, dict[str, float]]:
        """Make the passes of this rank, and leave its gradients and buffers in place. Return its part of the figures.

        Raises:
            JobError: they fail, although those of the whole model do not.
        """
        trainer, own = self._trainer, self._context.dp_rank

        def read() -> list[Any]:
            return [batch if trainer.reads_data else None for batch in batches.of(own)]

        train: dict[str, float] = {}
        try:
            with ExpectedNumbers(communicates=True) if drew else contextlib.nullcontext():
                evaluation = sums_of(trainer.evaluate(read()[0], batches.rows))
                if self._trains:
                    self._begin()
                    loss_sum, weight, norm = trainer.pass_once(read(), batches)
                    train = {LOSS: float(loss_sum), "weight": float(weight)} if self._context.counts_samples else {}
                    train[NORM] = float(norm)
            trainer.confirm()
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            if is_broken_connection(e) or is_own_error(e):
                raise
            traceback.print_exc()  # into the log of the rank
            reason = " ".join(error_text(e).split())[:300]
            raise JobError(
                f"{trainer.divided_by}: the model fails as the workers compute it ({reason}), and not on one worker. "
                f"{trainer.remedy}"
            ) from e
        return {"train": train, EVALUATION: evaluation}

    def _apart(self, header: Mapping[str, Any], expected: Passed | None) -> list[tuple[str, str, float]]:
        """Compare gradients and buffers of this rank with what the first rank expects. Collective.

        Returns:
            Kind, name and difference of what differs.
        """
        buffers = dict(self._trainer.trained.module().named_buffers(remove_duplicate=False))
        found: list[tuple[str, str, float]] = []

        def gradient(names: Sequence[str], whole: Tensor) -> None:
            name = next((name for name in names if name in self._parameters), None)
            box = None if name is None else self._box(name)
            if name is not None and box is not None:
                parameter = self._parameters[name]
                own = torch.zeros_like(parameter) if parameter.grad is None else dense(parameter.grad)
                wanted = whole[box.slices_in(Box.whole(box.full))]
                by = difference(own.to(whole.device), wanted, whole, scale=header["scale"])
                found.append(("gradient", names[0], by))

        def buffer(names: Sequence[str], whole: Tensor) -> None:
            if (own := buffers.get(names[0])) is not None:
                found.append(("buffer", names[0], difference(own, whole, whole)))

        self._for_each(header["gradients"], None if expected is None else expected.gradients, gradient)
        self._for_each(header["buffers"], None if expected is None else expected.buffers, buffer)
        return [one for one in found if not one[-1] <= TOLERANCE]

    def _for_each(
        self,
        listed: Sequence[tuple[Sequence[str], Sequence[int], str]],
        own: Mapping[str, Tensor] | None,
        compare: Callable[[Sequence[str], Tensor], None],
    ) -> None:
        """Send tensors of the first rank to all, some at a time, and compare each. Collective.

        Args:
            listed: names, shape and dtype of each.
            own: what the first rank has of them, by their first names; the rest are zeros. None on other ranks.
            compare: is given names and tensor.
        """
        like = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for _, shape, dtype in listed]
        for message in messages_of([tensor.nbytes for tensor in like]):
            names = [first for first, _, _ in listed[message]]
            tensors = [torch.zeros_like(tensor, device=self._context.device) for tensor in like[message]]
            for (first, *_), tensor in zip(names, tensors, strict=True):
                if own is not None and first in own:
                    tensor.copy_(own[first])
            broadcast_tensors(tensors, source=0, device=self._context.device)
            self._trainer.confirm()
            for of_tensor, tensor in zip(names, tensors, strict=True):
                compare(of_tensor, tensor)

    def _verdict(
        self, reference: _Reference, batches: Batches, ranks: Sequence[Mapping[str, Any]]
    ) -> tuple[str | None, str | None]:
        """Return the error about what differs, and what was not compared; None for each that there is not."""
        expected, figures = reference.passed, figures_of(ranks)
        worst: dict[tuple[str, str], float] = {}
        for kind, name, by in itertools.chain.from_iterable(rank["apart"] for rank in ranks):
            worst[kind, name] = max(by, worst.get((kind, name), 0.0))
        for name, wanted in expected.figures.items():
            if math.isfinite(wanted):  # of an evaluation, at values that no step has changed
                worst["figure", name] = figure_apart(figures.get(name), wanted)
        apart = [Apart(kind=kind, name=name, by=by) for (kind, name), by in worst.items() if not by <= TOLERANCE]
        if not apart:
            return None, None
        apart, drawn = self._beyond_rounding(reference, batches, apart)
        note = "it draws random numbers, so only what does not depend on them was" if drawn else None
        # What makes another gradient of the parts of a batch may do so too of those that DDP weighs otherwise.
        warned = not self._trainer.divides_model and any(OTHERWISE in text for text in self._trainer.setup_warnings())
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
        self, reference: _Reference, batches: Batches, apart: Sequence[Apart]
    ) -> tuple[list[Apart], bool]:
        """Return what differs by more than rounding, or random numbers, explain, and whether there are such numbers."""

        def changes(**how: Any) -> list[float]:
            passed = reference.undivided.passed(batches, trains=self._trains, **how)
            return [apart_from(reference.passed, passed, one) for one in apart]

        drawn = changes(seed=self._seed + 1)
        unit = max(torch.finfo(dtype).eps for dtype in self._trainer.compared_dtypes) / 2
        rounded = [changes(seed=self._seed, rounding=unit * (1 + number)) for number in range(ROUNDINGS)]
        least = FACTOR * unit if unit > TOLERANCE else 0.0  # sums in 16 bits round, whatever the weights are
        limits = [
            max(least if one.is_gradient else 0.0, FACTOR * max(changed))
            for one, *changed in zip(apart, drawn, *rounded, strict=True)
        ]
        return [one for one, limit in zip(apart, limits, strict=True) if not one.by <= limit], max(drawn) > RANDOM

    def _box(self, name: str) -> Box | None:
        return self._trainer.trained.placements[name].box(self._mesh, self._rank)

    def _note(self, reason: str) -> tuple[str, ...]:
        text = f"{self._trainer.divided_by}: what the workers compute was not compared with the whole model: {reason}"
        return (text,) if self._rank == 0 else ()

    def _broadcast(self, value: Any) -> Any:
        found = broadcast_json(value, source=0, rank=self._rank, device=self._context.device)
        self._trainer.confirm()
        return found

    def _gathered(self, value: Any) -> list[Any]:
        found = gather_json(value, world_size=self._mesh.world_size, device=self._context.device)
        self._trainer.confirm()
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
