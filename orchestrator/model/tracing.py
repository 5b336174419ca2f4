"""A model that is no ``nn.Sequential`` as a sequence of layers, by the tracer of ``torch.distributed.pipelining``.

The graph is cut before each of the model's own modules that can begin a stage. What a later layer needs of an
earlier one passes through those between, so that skip connections are no obstacle.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline
from torch.utils import _pytree as pytree

from orchestrator.config.build import did_you_mean
from orchestrator.model.partial_init import Outline, build_part, outline, places
from orchestrator.model.sequence import LayerSequence

Key = tuple[int, int]
"""A value that flows: the number of the piece it comes from, -1 for the model's input, and which of its tensors."""

_ADVICE = "make job.model() an nn.Sequential of named layers, or use strategy=ddp"


class Traced(LayerSequence):
    """Pieces of the traced graph, for training and for evaluation: dropout and the like are part of a graph."""

    def __init__(
        self, build: Callable[[], nn.Module], inputs: Any, device: torch.device, *, split: Sequence[str]
    ) -> None:
        """``inputs``: a real micro-batch. ``split``: names of layers where a cut is asked for.

        Raises:
            ValueError: the model cannot be traced, or not cut there; the text says why and what else to do.
        """
        if strange := {type(leaf).__name__ for leaf in pytree.tree_leaves(inputs) if not isinstance(leaf, Tensor)}:
            raise ValueError(f"the model takes {' and '.join(sorted(strange))}; the tracer follows tensors; {_ADVICE}")
        whole = outline(build, device)
        names, output = _beginnings(whole, inputs, split)
        graphs = {training: _trace(build, inputs, device, names[1:], training) for training in (True, False)}
        flows = {training: _flow_of(graph.pipe) for training, graph in graphs.items()}
        if flows[True] != flows[False]:
            raise ValueError(f"other values flow in training than in evaluation; {_ADVICE}")
        *needs, outputs = flows[True]
        if len(outputs) != output.num_leaves:
            raise ValueError(f"the model returns something else than tensors; {_ADVICE}")
        carried = _carried(flows[True])
        pieces = [
            Piece(
                number,
                {training: _flat(graph.pipe.get_stage_module(number)) for training, graph in graphs.items()},
                takes=carried[number],
                needs=of_piece,
                gives=carried[number + 1] if number + 1 < len(needs) else outputs,
                output=None if number + 1 < len(needs) else output,
            )
            for number, of_piece in enumerate(needs)
        ]
        super().__init__(Outline(whole.model, graphs[True].fake, whole.undivided), names, pieces)
        self._persistent = set(whole.model.state_dict())

    def tensors_of(self, number: int, module: nn.Module) -> Mapping[str, Tensor]:
        state = module.state_dict(keep_vars=True)
        named = {name.removeprefix(f"{Piece.GRAPH}."): tensor for name, tensor in state.items()}
        return {name: tensor for name, tensor in named.items() if name in self._persistent}

    def realise(self, build: Callable[[], nn.Module], numbers: Collection[int], *, seed: int) -> dict[int, nn.Module]:
        own = {number: self.modules[number] for number in numbers}
        every = [place for piece in own.values() for place in places(piece)]
        named = [(place, place.name.removeprefix(f"{Piece.GRAPH}.")) for place in every]
        wanted = {name for _, name in named}
        part = {place.name: place.tensor for place in places(build_part(build, wanted.__contains__, seed=seed))}
        for place, name in named:
            place.fill({id(place.tensor): part[name]})
        for piece in own.values():
            assert isinstance(piece, Piece)
            piece.share()
        return dict(own)


class Piece(nn.Module):
    """A part of the graph. Takes and gives the values at its ends: one tensor, or a tuple of several; the first piece
    takes the model's input, the last one gives its output, whose structure is ``output``."""

    GRAPH = "graph"

    def __init__(
        self,
        number: int,
        graphs: Mapping[bool, nn.Module],
        *,
        takes: tuple[Key, ...],
        needs: tuple[Key, ...],
        gives: tuple[Key, ...],
        output: pytree.TreeSpec | None,
    ):
        super().__init__()
        self.add_module(self.GRAPH, graphs[True])
        self._graphs = dict(graphs)  # the one for evaluation is no submodule: its tensors are the other's
        self._number = number
        self._takes, self._needs, self._gives = takes, needs, gives
        self._output = output

    def forward(self, value: Any) -> Any:
        tensors = pytree.tree_leaves(value)
        keys = self._takes if self._number else [(-1, index) for index in range(len(tensors))]
        known = dict(zip(keys, tensors, strict=True))
        out = self._graphs[self.training](*(known[key] for key in self._needs))
        for index, tensor in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
            known[self._number, index] = tensor
        if self._output is not None:
            return pytree.tree_unflatten([known[key] for key in self._gives], self._output)
        # What only passes through becomes a tensor of its own, which a stage's result has to be.
        given = tuple(known[key].clone() if key in self._takes else known[key] for key in self._gives)
        return given[0] if len(given) == 1 else given

    def train(self, mode: bool = True) -> Piece:
        self.training = mode
        return self

    def share(self) -> None:
        """Let the graph for evaluation have the tensors of the one for training."""
        real = {place.name: place.tensor for place in places(self._graphs[True])}
        for place in list(places(self._graphs[False])):
            place.fill({id(place.tensor): real[place.name]})


@dataclass(frozen=True)
class _Graph:
    pipe: Pipe
    fake: FakeTensorMode


def _beginnings(whole: Outline, inputs: Any, split: Sequence[str]) -> tuple[list[str], pytree.TreeSpec]:
    """The modules that begin a piece, in the order of their calls: the outermost ones, and those of ``split``; and the
    structure of the model's output.

    Only a module that is called once in a forward pass can begin one.
    """
    calls: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        for name, module in whole.model.named_modules()
        if name and not isinstance(module, nn.Identity)  # which leaves no trace
    ]
    with whole.fake:
        out = whole.model(pytree.tree_map_only(Tensor, whole.like, inputs))
    for hook in hooks:
        hook.remove()
    times = Counter(calls)
    once = [name for name in calls if times[name] == 1]
    for name in split:
        if name in times and name not in once:
            raise ValueError(
                f"strategy.split=[{','.join(split)}]: {name}: is called {times[name]} times in a forward pass; only a "
                "layer that is called once can begin a stage"
            )
        if name not in times:
            raise ValueError(f"strategy.split=[{','.join(split)}]: {name}: no such layer; {did_you_mean(name, once)}")
    called = set(calls)

    def outermost(name: str) -> bool:
        parts = name.split(".")
        return not any(".".join(parts[:depth]) in called for depth in range(1, len(parts)))

    # Where a layer asked for is the first one of another, both would begin at one point.
    chosen = [name for name in once if outermost(name) or name in split]
    after = dict(itertools.pairwise(calls))
    first = [name for name in chosen if not (after.get(name, "").startswith(f"{name}.") and after[name] in split)]
    return first, pytree.tree_structure(out)


def _trace(
    build: Callable[[], nn.Module], inputs: Any, device: torch.device, split: Sequence[str], training: bool
) -> _Graph:
    fresh = outline(build, device)  # tracing leaves marks on a model
    fresh.model.train(training)
    try:
        with fresh.fake, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            example = pytree.tree_map_only(Tensor, fresh.like, inputs)
            pipe = pipeline(fresh.model, (example,), split_spec={name: SplitPoint.BEGINNING for name in split})
    except Exception as e:
        reason = " ".join(str(e.__cause__ or e).split())[:300]
        raise ValueError(f"the model {type(fresh.model).__name__} cannot be cut: {reason}; {_ADVICE}") from e
    if pipe.num_stages != len(split) + 1:
        raise ValueError(
            f"the model {type(fresh.model).__name__} cannot be cut: {len(split)} cuts gave {pipe.num_stages} pieces; "
            f"{_ADVICE}"
        )
    return _Graph(pipe, fresh.fake)


def _flat(piece: nn.Module) -> nn.Module:
    """The piece, called with the tensors that it needs: the tracer's own first piece takes the model's input."""
    assert isinstance(piece, fx.GraphModule)
    piece.graph.set_codegen(fx.graph.CodeGen())
    piece.recompile()
    return piece


def _flow_of(pipe: Pipe) -> list[tuple[Key, ...]]:
    """The values that each piece is called with, and at the end those that the model returns."""
    keys: dict[fx.Node, Key] = {}
    needs: list[tuple[Key, ...]] = []
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            keys[node] = (-1, len(keys))
        elif node.op == "call_module":
            keys[node] = (len(needs), 0)
            needs.append(tuple(keys[argument] for argument in node.args))
        elif node.op == "call_function":  # one of several results
            keys[node] = (keys[node.args[0]][0], node.args[1])
        elif node.op == "output":
            needs.append(tuple(keys[leaf] for leaf in pytree.tree_leaves(node.args[0]) if leaf in keys))
    return needs


def _carried(needs: Sequence[tuple[Key, ...]]) -> list[tuple[Key, ...]]:
    """What flows into each piece: all that it or a later one needs of those before it."""
    return [
        tuple(sorted({key for later in needs[number:] for key in later if key[0] < number}))
        for number in range(len(needs))
    ]
