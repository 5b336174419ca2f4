"""What ranks have of the whole model, brought to the first of them, and gradients of the whole model, brought to them.

The first rank asks for each, and the others do as it says until it ends. So it need not have room for all at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.compat.torch import as_bytes
from orchestrator.model.proofs.proving import NEGLIGIBLE, TOLERANCE
from orchestrator.planning.placement import Box
from orchestrator.state.model_state import own_tensors
from orchestrator.state.transport import broadcast_json, broadcast_tensors, gather_json, messages_of

if TYPE_CHECKING:
    from orchestrator.strategies.compared_trainer import ComparedTrainer


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What is known of the gradients of the whole model.

    Attributes:
        norm: of all.
        differences: by how much they differ from those of the first pass, or others from those, relative to the largest
            entry; by the first name of the parameter.
    """

    norm: float
    differences: Mapping[str, float]


class Exchange:
    """Moves values and gradients between this rank and the others.

    Attributes:
        parameters: what this rank trains, by all names.
        boxes: which part of the whole each is.
        interrupted: whether other ranks may be waiting in the midst of something, because this one has failed.
    """

    def __init__(self, trainer: ComparedTrainer):
        context = trainer.context
        self._trainer = trainer
        self._rank, self._device = context.global_rank, context.device
        self._count = context.mesh.world_size
        self.parameters = dict(trainer.trained.module().named_parameters(remove_duplicate=False))
        boxes = {name: trainer.trained.placements[name].box(context.mesh, self._rank) for name in self.parameters}
        self.boxes = {name: box for name, box in boxes.items() if box is not None}
        self._first = {name for name in self.boxes if trainer.is_first_with(name)}
        self._ranks: Sequence[Mapping[str, Any]] = ()
        self._entries: Sequence[tuple[Sequence[str], Sequence[int], str]] = ()
        self._trained: Sequence[int] = ()
        self._passes: list[dict[int, Tensor]] = []
        self.interrupted = False

    def listed(self) -> dict[str, Any]:
        """Return what this rank has, as JSON: the ranges, the dtype and whether it is the first, by name."""
        tensors = own_tensors(self._trainer.trained.module())
        boxes = {name: self.boxes.get(name) for name in tensors if name in self.boxes or name not in self.parameters}
        return {
            name: [
                None if box is None else box.ranges,
                _dtype(tensors[name]),
                name in self._first or name not in self.parameters,
            ]
            for name, box in boxes.items()
        }

    def use(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Take what all ranks have :meth:`listed`."""
        self._ranks = ranks

    # On the first rank

    @property
    def names(self) -> set[str]:
        """The names of all tensors that ranks have."""
        return {name for rank in self._ranks for name in rank}

    @property
    def names_of_parameters(self) -> set[str]:
        """Those of the parameters."""
        return {name for rank in self._ranks for name, (ranges, *_) in rank.items() if ranges is not None}

    @property
    def nbytes(self) -> int:
        """The size of the parameters of the whole model."""
        return sum(
            math.prod(sum(size for _, size in places) for places in ranges) * getattr(torch, dtype).itemsize
            for rank in self._ranks
            for ranges, dtype, is_first in rank.values()
            if is_first and ranges is not None
        )

    def describe(self, model: nn.Module) -> None:
        """Tell all ranks of the parameters and the persistent buffers of the whole model."""
        every: dict[int, tuple[list[str], Tensor]] = {}
        for name, tensor in own_tensors(model).items():
            every.setdefault(id(tensor), ([], tensor))[0].append(name)
        entries = [[names, list(tensor.shape), _dtype(tensor)] for names, tensor in every.values()]
        self._tell("_describe", entries, [n for n, (_, tensor) in enumerate(every.values()) if tensor.requires_grad])

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors of the whole model the values that the ranks have. Those that no rank has keep theirs."""
        numbers = [self._numbers[name] for name in tensors]
        wanted = dict(zip(numbers, tensors.values(), strict=True))
        self._tell("_send", list(wanted), wanted=wanted)

    def begin(self) -> None:
        """Begin with gradients of zeros. Those of the first pass are kept, and the others are compared with them."""
        self._tell("_begin")

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add to the gradients that ranks have of the whole model."""
        own = {self._numbers[name]: gradient for name, gradient in gradients.items()}
        self._tell("_add", list(own), own=own)

    def measured(self) -> Gradients:
        """Return the norm of the gradients, and how they differ from those of the first pass."""
        found: Gradients = self._tell("_measured_pass")
        return found

    def end(self, value: Any) -> Any:
        """Let the other ranks go on with a JSON ``value``."""
        return broadcast_json(["", value], source=0, rank=self._rank, device=self._device)[1]

    # On the others

    def follow(self) -> Any:
        """Do as the first rank says, until it ends; return what it says then."""
        while True:
            command, *arguments = broadcast_json(None, source=0, rank=self._rank, device=self._device)
            if not command:
                return arguments[0]
            getattr(self, command)(*arguments)

    # On all ranks

    def compared(self) -> Gradients:
        """Compare the gradients of this rank with those of the first pass of the whole model. Collective."""
        return self._measured(lambda name: self.parameters[name].grad)

    def _tell(self, command: str, *arguments: Any, **own: Any) -> Any:
        self.interrupted = True
        broadcast_json([command, *arguments], source=0, rank=self._rank, device=self._device)
        found = getattr(self, command)(*arguments, **own)
        self.interrupted = False
        return found

    def _describe(self, entries: Sequence[tuple[Sequence[str], Sequence[int], str]], trained: Sequence[int]) -> None:
        self._entries, self._trained = entries, trained
        self._numbers = {name: number for number, (names, _, _) in enumerate(entries) for name in names}

    @torch.no_grad()
    def _send(self, numbers: Sequence[int], *, wanted: Mapping[int, Tensor] | None = None) -> None:
        """Send tensors to the first rank, from those that are the first to have their parts."""
        parts: defaultdict[int, list[tuple[int, str, Box, torch.dtype]]] = defaultdict(list)
        for number in numbers:
            names, shape, _ = self._entries[number]
            for rank, name, ranges, dtype in self._owners(names):
                whole = Box.whole(shape)
                box = whole if ranges is None else Box(full=tuple(shape), ranges=ranges)
                if math.prod(box.shape):
                    parts[rank].append((number, name, box, getattr(torch, dtype)))
        own = own_tensors(self._trainer.trained.module())  # anew, because forward passes may replace buffers
        for rank, of_rank in parts.items():
            sizes = [math.prod(box.shape) * dtype.itemsize for _, _, box, dtype in of_rank]
            for message in messages_of(sizes):
                if self._rank == rank:
                    tensors = [own[name].detach() for _, name, _, _ in of_rank[message]]
                    if rank > 0:
                        dist.send(torch.cat([as_bytes(tensor).to(self._device) for tensor in tensors]), dst=0)
                elif self._rank == 0:
                    received = torch.empty(sum(sizes[message]), dtype=torch.uint8, device=self._device)
                    dist.recv(received, src=rank)
                    pieces = received.split(sizes[message])
                    described = zip(pieces, of_rank[message], strict=True)
                    tensors = [piece.view(dtype).view(box.shape) for piece, (_, _, box, dtype) in described]
                if wanted is not None:  # on the first rank
                    for tensor, (number, _, box, _) in zip(tensors, of_rank[message], strict=True):
                        wanted[number][box.slices_in(Box.whole(box.full))] = tensor.to(wanted[number])

    def _owners(self, names: Sequence[str]) -> list[tuple[int, str, Any, str]]:
        """Return which ranks send what of a tensor with these names; of a buffer, the first one that has it."""
        found = [
            (number, name, *rank[name][:2])
            for number, rank in enumerate(self._ranks)
            if (name := next((name for name in names if name in rank and rank[name][2]), None)) is not None
        ]
        return found[:1] if found and found[0][2] is None else found

    def _begin(self) -> None:
        self._passes = [*self._passes[:1], {}]

    def _add(self, numbers: Sequence[int], *, own: Mapping[int, Tensor] | None = None) -> None:
        sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in self._of(numbers)]
        for message in messages_of(sizes):
            tensors = [
                torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) if own is None else own[number]
                for number, (_, shape, dtype) in zip(numbers[message], self._of(numbers[message]), strict=True)
            ]
            broadcast_tensors(tensors, source=0, device=self._device)
            for number, tensor in zip(numbers[message], tensors, strict=True):
                if (name := self._own_name(number)) is not None:
                    box = self.boxes[name]
                    part = tensor[box.slices_in(Box.whole(box.full))]
                    before = self._passes[-1].get(number)
                    self._passes[-1][number] = part.clone() if before is None else before + part

    def _of(self, numbers: Sequence[int]) -> list[tuple[Sequence[str], Sequence[int], str]]:
        return [self._entries[number] for number in numbers]

    def _own_name(self, number: int) -> str | None:
        return next((name for name in self._entries[number][0] if name in self.boxes), None)

    def _measured_pass(self) -> Gradients:
        return self._measured(lambda name: self._passes[-1].get(self._numbers[name]), of_last=True)

    def _measured(self, gradient: Callable[[str], Tensor | None], *, of_last: bool = False) -> Gradients:
        """Compare gradients with those of the first pass. Return the norm of these, or ``of_last``."""
        own: dict[str, tuple[float, float, float]] = {}
        for number in self._trained:
            if (name := self._own_name(number)) is None:
                continue
            parameter = self.parameters[name]
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device)
            found, first = gradient(name), self._passes[0].get(number)
            found, first = (zeros if one is None else dense(one).to(self._device) for one in (found, first))
            measured = found if of_last else first
            squares = float(measured.abs().double().square().sum()) if name in self._first else 0.0
            own[str(number)] = largest_of(first), squares, distance(found, first)
        largest: dict[str, float] = {}
        apart: dict[str, float] = {}
        squares = 0.0
        for rank in gather_json(own, world_size=self._count, device=self._device):
            for number, (most, own_squares, by) in rank.items():
                name = self._entries[int(number)][0][0]
                largest[name] = max(most, largest.get(name, 0.0))
                apart[name] = max(by, apart.get(name, 0.0))
                squares += own_squares
        least = max(largest.values(), default=0.0) * NEGLIGIBLE / TOLERANCE
        differences = {name: relative(by, max(largest[name], least)) for name, by in apart.items()}
        return Gradients(norm=squares**0.5, differences=differences)


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor."""
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of two tensors; infinite for other shapes, other integers, and no numbers."""
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.is_floating_point() and not wanted.is_complex():
        return 0.0 if found.equal(wanted.to(found.dtype)) else math.inf
    apart = largest_of(found.to(wanted.dtype) - wanted)
    return apart if apart == apart else math.inf


def relative(apart: float, largest: float) -> float:
    """Return a difference, relative to the largest number if there is one."""
    by = apart / largest if largest else apart
    return by if by == by else math.inf


def largest_of(tensor: Tensor) -> float:
    """Return the largest entry of a tensor, without its sign."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
