"""Any model as a sequence of pieces of its recorded forward pass, in which its submodules run as they are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.torch import pytree
from orchestrator.model.batch import leaves, map_tensors, tensors_in
from orchestrator.model.fake_calls import fake_calls, first_modules
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.python_state import python_state
from orchestrator.model.stages.sequence import LayerSequence, saved_tensors
from orchestrator.model.stages.tape import Call, HeldTensor, Slot, Step, Tape, TapeError, play, record, restore
from orchestrator.model.tensor_slots import new_tensors_dropped, tensor_slots

ValueKey = tuple[int, int]
"""A tensor that flows between pieces: the piece that computes it (-1 for the input), and its number among those."""


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """A part of a tape.

    Attributes:
        steps: its calls.
        slots: the slot of each value that flows into it or out of it.
        output: the model's output for the last piece, None for the others.
    """

    steps: tuple[Step, ...]
    slots: Mapping[ValueKey, Slot]
    output: Any = None


class RecordedLayers(LayerSequence):
    """The pieces of a recorded model.

    The model is recorded twice, in training and in evaluation, because glue such as ``F.dropout`` depends on the mode.
    """

    def __init__(
        self,
        whole: FakeModel,
        inputs: Any,
        *,
        split: Sequence[str],
        largest_share: float | None = None,
        closed: frozenset[str] = frozenset(),
        call: Call | None = None,
    ) -> None:
        """
        Args:
            whole: the model, of fake tensors.
            inputs: a real micro-batch on the device of the fake model.
            split: the names of layers at which stages are to begin.
            largest_share, closed: see :func:`~orchestrator.model.fake_calls.first_modules`.
            call: calls the model with the inputs, and is recorded too; None to only call it.

        Raises:
            TapeError: the forward pass cannot be recorded.
            ValueError: the model cannot be cut at these layers.
        """
        if other := {type(leaf).__name__ for leaf in leaves(inputs) if not isinstance(leaf, Tensor)}:
            raise ValueError(
                f"the model takes {' and '.join(sorted(other))}; only tensors can be cut into micro-batches"
            )
        names = first_modules(whole, inputs, split, largest_share=largest_share, closed=closed, call=call)
        no_layer = TapeError(
            f"{type(whole.model).__name__}: its forward() calls no layer exactly once, and only such a layer can begin "
            "a stage"
        )
        if not names and isinstance(whole.model, torch.jit.ScriptModule):  # its recording would tell less
            raise no_layer
        tapes = {training: _record(whole, inputs, names, call, training=training) for training in (True, False)}
        if not names:  # if the forward pass cannot be recorded, that has told why
            raise no_layer
        cut_tapes = {training: _cut(tape, names) for training, tape in tapes.items()}
        flows = {training: _flow(pieces, tapes[training]) for training, pieces in cut_tapes.items()}
        if flows[True].keys() != flows[False].keys():
            raise TapeError("the model passes other values between its layers in training than in eval()")
        keys = {training: {slot: key for key, slot in flow.items()} for training, flow in flows.items()}
        needs = [
            {keys[training][slot] for training in keys for slot in _used(cut_tapes[training][index], keys[training])}
            for index in range(len(names))
        ]
        outputs = {keys[t][slot] for t, tape in tapes.items() for slot in _slots_of(tape.output) if slot in keys[t]}
        carried = _carried(needs, outputs)
        pieces = [
            TapePiece(
                {
                    training: Excerpt(
                        steps=cut_tapes[training][index],
                        slots=flows[training],
                        output=tapes[training].output if index == len(names) - 1 else None,
                    )
                    for training in (True, False)
                },
                takes=carried[index],
                gives=carried[index + 1] if index + 1 < len(names) else (),
                shapes=[t.shape for t in tensors_in(inputs)] if index == 0 else None,
                last=index == len(names) - 1,
                model=whole.model,
            )
            for index in range(len(names))
        ]
        saved = saved_tensors(whole.model)
        used = {id(tensor) for piece in pieces for tensor in piece.named_tensors().values()}
        slots = {slot.name for slot in tensor_slots(whole.model)}
        self.unused = frozenset(name for name, t in saved.items() if id(t) not in used and name in slots)
        pieces[0] = pieces[0].of(whole.model, unused=sorted(self.unused))
        super().__init__(whole, names, pieces)
        self.call = call
        self._pieces = pieces
        self._persistent = saved.keys()

    def _tensors_of(self, index: int, module: nn.Module) -> Mapping[str, Tensor]:
        assert isinstance(module, TapePiece)
        return {name: tensor for name, tensor in module.named_tensors().items() if name in self._persistent}

    def of(self, model: nn.Module, indices: Collection[int]) -> dict[int, nn.Module]:
        return {index: self._pieces[index].of(model) for index in indices}

    def uses(self, indices: Collection[int]) -> Callable[[str], bool]:
        return {name for index in indices for name in self._pieces[index].slot_names()}.__contains__


class TapePiece(nn.Module):
    """A part of the recorded forward pass.

    It takes and returns one tensor or a tuple of tensors: those that it or a later piece needs. The first piece takes
    the model's input, and the last one returns the model's output.

    Attributes:
        call_names: the names of the modules that it calls as they are.
    """

    def __init__(
        self,
        excerpts: Mapping[bool, Excerpt],
        *,
        takes: tuple[ValueKey, ...],
        gives: tuple[ValueKey, ...],
        shapes: Sequence[torch.Size] | None,
        last: bool,
        model: nn.Module,
        unused: Sequence[str] = (),
    ):
        """
        Args:
            excerpts: its part of the tape for training (True) and for evaluation (False).
            takes: the values that it is called with, unless it is the first piece.
            shapes: the shapes of the model's input, for the first piece; None for the others.
            gives: the values that it returns, unless it is the last piece.
            last: whether it returns the model's output.
            model: the model that holds the modules and tensors that the steps use.
            unused: the names of further tensors to hold.
        """
        super().__init__()
        self._excerpts, self._takes, self._gives, self._shapes, self._last = dict(excerpts), takes, gives, shapes, last
        steps = [step for excerpt in self._excerpts.values() for step in excerpt.steps]
        self.call_names = list(dict.fromkeys(step.target for step in steps if isinstance(step.target, str)))
        self._held_names = list(dict.fromkeys(name for step in steps for name in step.held()))
        self._held_names += [
            leaf.name
            for excerpt in self._excerpts.values()
            for leaf in pytree.tree_leaves(excerpt.output)
            if isinstance(leaf, HeldTensor) and leaf.name not in self._held_names
        ]
        self._unused = unused
        self._held_names += unused
        # Under plain names, because the model's own may be names of methods; in lists, because a dot is not allowed.
        self.calls = nn.ModuleList([model.get_submodule(name) for name in self.call_names])
        held = {slot.name: slot.tensor for slot in tensor_slots(model) if slot.name in self._held_names}
        for number, name in enumerate(self._held_names):
            tensor = held[name]
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"held_{number}", tensor)
            else:
                self.register_buffer(f"held_{number}", tensor)

    def forward(self, value: Any) -> Any:
        excerpt = self._excerpts[self.training]
        tensors = tensors_in(value)
        keys = self._takes
        if self._shapes is not None:
            self._check_shapes(tensors)
            keys = tuple((-1, number) for number in range(len(tensors)))
        values = {excerpt.slots[key]: tensor for key, tensor in zip(keys, tensors, strict=True) if key in excerpt.slots}
        held = {name: getattr(self, f"held_{number}") for number, name in enumerate(self._held_names)}
        play(excerpt.steps, values, dict(zip(self.call_names, self.calls, strict=True)), held)
        if self._last:
            return restore(excerpt.output, values, held)
        # A stage must return tensors of its own, so values that pass through are cloned.
        given = []
        for key in self._gives:
            tensor = values[excerpt.slots[key]]
            given.append(tensor.clone() if key in keys else tensor)
        return given[0] if len(given) == 1 else tuple(given)

    def _check_shapes(self, tensors: Sequence[Tensor]) -> None:
        """Refuse an input of other sizes, which may be constants in the recording."""
        found, recorded = [t.shape[1:] for t in tensors], [shape[1:] for shape in self._shapes or ()]
        if found != recorded:
            raise ValueError(
                f"the samples of a batch have the shapes {', '.join(str(list(s)) for s in found)}, those of the first "
                f"sample {', '.join(str(list(s)) for s in recorded)}, and stages of a model that is not an "
                "nn.Sequential take one shape only; pad the samples to one length in Job.collate, or use strategy=ddp"
            )

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the modules that it calls, by the model's own names."""
        tensors: dict[str, Tensor] = {}
        for name, module in zip(self.call_names, self.calls, strict=True):
            tensors |= module.state_dict(prefix=f"{name}.", keep_vars=True)
        return tensors | {name: getattr(self, f"held_{number}") for number, name in enumerate(self._held_names)}

    def slot_names(self) -> set[str]:
        """Return the names of all tensors that its modules hold or that it uses directly."""
        names = {
            f"{name}.{slot.name}"
            for name, module in zip(self.call_names, self.calls, strict=True)
            for slot in tensor_slots(module)
        }
        return names | set(self._held_names)

    def of(self, model: nn.Module, *, unused: Sequence[str] | None = None) -> TapePiece:
        """Return the same piece of another instance of the model, or one with other ``unused`` tensors."""
        return TapePiece(
            self._excerpts,
            takes=self._takes,
            gives=self._gives,
            shapes=self._shapes,
            last=self._last,
            model=model,
            unused=self._unused if unused is None else unused,
        )


def _record(whole: FakeModel, inputs: Any, names: Sequence[str], call: Call | None, *, training: bool) -> Tape:
    parents = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1)}
    opened = [whole.model, *map(whole.model.get_submodule, sorted(parents))]
    before = [python_state(module) for module in opened]
    mode = contextlib.nullcontext() if training else evaluation_mode(whole.model)
    with mode, whole.mode, new_tensors_dropped(whole.model), fake_calls(whole, opened=opened):
        tape = record(whole.model, map_tensors(whole.fake_input, inputs), opened=parents, call=call)
    # An earlier forward pass has set what is set only once, such as a cached shape.
    for module, state in zip(opened, before, strict=True):
        after = python_state(module)
        if changed := [name for name, v in after.items() if state.get(name) is not v and state.get(name) != v]:
            raise TapeError(
                f"{type(module).__name__}: each forward pass changes {changed[0]}, and a recorded one would not; move "
                "the code that does into a module of its own, or keep the value in a buffer"
            )
    return tape


def _cut(tape: Tape, names: Sequence[str]) -> list[tuple[Step, ...]]:
    """Cut the tape before the calls of these modules; what comes before the first one belongs to it."""
    if missing := [name for name in names if name not in tape.begins]:
        raise TapeError(f"the layer {missing[0]} is called only in training or only in eval()")
    positions = [0, *(tape.begins[name] for name in names[1:]), len(tape.steps)]
    if positions != sorted(positions):
        raise TapeError("the layers are called in another order in eval()")
    return [tape.steps[begin:end] for begin, end in itertools.pairwise(positions)]


def _flow(pieces: Sequence[tuple[Step, ...]], tape: Tape) -> dict[ValueKey, Slot]:
    """Return the values that leave their piece, numbered within it, and the model's inputs."""
    owner = {slot: index for index, steps in enumerate(pieces) for step in steps for slot in step.results}
    leaving: set[Slot] = set()
    for index, steps in enumerate(pieces):
        leaving |= {slot for step in steps for slot in step.slots() if owner.get(slot, index) != index}
    flow = {(-1, number): Slot(number) for number in range(tape.num_inputs)}
    for index in range(len(pieces)):
        mine = sorted((slot for slot in leaving if owner[slot] == index), key=lambda slot: slot.index)
        flow |= {(index, number): slot for number, slot in enumerate(mine)}
    last = len(pieces) - 1
    outside = {slot for slot in _slots_of(tape.output) if owner.get(slot, last) != last} - set(flow.values())
    for slot in sorted(outside, key=lambda slot: slot.index):
        index = owner[slot]
        flow[index, sum(key[0] == index for key in flow)] = slot
    return flow


def _slots_of(tree: Any) -> list[Slot]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Slot)]


def _used(steps: Sequence[Step], keys: Mapping[Slot, ValueKey]) -> set[Slot]:
    return {slot for step in steps for slot in step.slots() if slot in keys}


def _carried(needs: Sequence[set[ValueKey]], outputs: set[ValueKey]) -> list[tuple[ValueKey, ...]]:
    """Return the values that flow into each piece: all that it, a later one or the output needs from earlier ones."""
    return [
        tuple(sorted(key for key in set().union(*needs[index:], outputs) if key[0] < index))
        for index in range(len(needs))
    ]
