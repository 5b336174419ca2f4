"""Any model as a sequence of layers, by the tracer of ``torch.distributed.pipelining``.

The model is traced to a graph, which is cut before each module that can begin a stage. A piece of the graph may need
values from several earlier pieces, as skip connections do. Each piece therefore also carries the values that only
later pieces need, so that the pieces form a plain sequence in which each one is called with the result of the one
before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

from orchestrator.compat.torch import FakeTensorMode, pytree
from orchestrator.model.calls import first_modules
from orchestrator.model.partial_init import FakeModel, build_fake, build_part
from orchestrator.model.sequence import LayerSequence
from orchestrator.model.tensor_slots import tensor_slots

ValueKey = tuple[int, int]
"""A tensor that flows: the index of the piece that returns it (-1 for the model's input) and its position there."""

_ADVICE = "make job.model() an nn.Sequential of named layers, or use strategy=ddp"


class TracedLayers(LayerSequence):
    """The pieces of a traced model.

    The model is traced twice, for training and for evaluation, because dropout and the like become part of the graph.
    """

    runs_modules_as_they_are = False

    def __init__(
        self, build: Callable[[], nn.Module], inputs: Any, device: torch.device, *, split: Sequence[str]
    ) -> None:
        """
        Args:
            build: the model's constructor.
            inputs: a real micro-batch on ``device``.
            device: the device on which the model will run.
            split: the names of layers at which stages are to begin.

        Raises:
            ValueError: the model cannot be traced, or not cut at these layers; the text says why and what else to do.
        """
        if other := {type(leaf).__name__ for leaf in pytree.tree_leaves(inputs) if not isinstance(leaf, Tensor)}:
            raise ValueError(
                f"the model takes {' and '.join(sorted(other))}; the tracer follows only tensors; {_ADVICE}"
            )
        whole = build_fake(build, device)
        names, output = first_modules(whole, inputs, split)
        graphs = {training: _trace(build, inputs, device, names[1:], training) for training in (True, False)}
        dataflows = {training: _dataflow(graph.pipe) for training, graph in graphs.items()}
        if dataflows[True] != dataflows[False]:
            raise ValueError(f"the model passes other values between its layers in training than in eval(); {_ADVICE}")
        *needs, outputs = dataflows[True]
        if len(outputs) != output.num_leaves:
            raise ValueError(f"the model returns something other than tensors; {_ADVICE}")
        carried = _carried(dataflows[True])
        pieces = [
            GraphPiece(
                index,
                {training: _with_flat_inputs(graph.pipe.get_stage_module(index)) for training, graph in graphs.items()},
                takes=carried[index],
                needs=piece_needs,
                gives=carried[index + 1] if index + 1 < len(needs) else outputs,
                output=None if index + 1 < len(needs) else output,
            )
            for index, piece_needs in enumerate(needs)
        ]
        super().__init__(FakeModel(whole.model, graphs[True].mode, whole.full_build_reason), names, pieces)
        self._persistent = set(whole.model.state_dict())

    def tensors_of(self, index: int, module: nn.Module) -> Mapping[str, Tensor]:
        state = module.state_dict(keep_vars=True)
        named = {name.removeprefix(f"{GraphPiece.GRAPH}."): tensor for name, tensor in state.items()}
        return {name: tensor for name, tensor in named.items() if name in self._persistent}

    def build_layers(
        self, build: Callable[[], nn.Module], indices: Collection[int], *, seed: int
    ) -> dict[int, nn.Module]:
        pieces = {index: self.modules[index] for index in indices}
        slots = [slot for piece in pieces.values() for slot in tensor_slots(piece)]
        named = [(slot, slot.name.removeprefix(f"{GraphPiece.GRAPH}.")) for slot in slots]
        wanted = {name for _, name in named}
        part = {slot.name: slot.tensor for slot in tensor_slots(build_part(build, wanted.__contains__, seed=seed))}
        for slot, name in named:
            slot.fill({id(slot.tensor): part[name]})
        for piece in pieces.values():
            assert isinstance(piece, GraphPiece)
            piece.share_tensors()
        return dict(pieces)


class GraphPiece(nn.Module):
    """A part of the traced graph, which also passes on the values that only later pieces need.

    It takes and returns one tensor or a tuple of tensors. The first piece takes the model's input, and the last one
    returns the model's output.
    """

    GRAPH = "graph"

    def __init__(
        self,
        index: int,
        graphs: Mapping[bool, nn.Module],
        *,
        takes: tuple[ValueKey, ...],
        needs: tuple[ValueKey, ...],
        gives: tuple[ValueKey, ...],
        output: pytree.TreeSpec | None,
    ):
        """
        Args:
            index: the index of this piece.
            graphs: its graphs for training (True) and for evaluation (False).
            takes: the values that it is called with.
            needs: the values that its graph is called with.
            gives: the values that it returns.
            output: the structure of the model's output for the last piece, None for the others.
        """
        super().__init__()
        self.add_module(self.GRAPH, graphs[True])
        self._graphs = dict(graphs)  # the one for evaluation is not a submodule, because it shares the tensors
        self._index = index
        self._takes, self._needs, self._gives = takes, needs, gives
        self._output = output

    def forward(self, value: Any) -> Any:
        tensors = pytree.tree_leaves(value)
        keys = self._takes if self._index else [(-1, position) for position in range(len(tensors))]
        known = dict(zip(keys, tensors, strict=True))
        out = self._graphs[self.training](*(known[key] for key in self._needs))
        for position, tensor in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
            known[self._index, position] = tensor
        if self._output is not None:
            return pytree.tree_unflatten([known[key] for key in self._gives], self._output)
        # A stage must return tensors of its own, so values that pass through are cloned.
        given = tuple(known[key].clone() if key in self._takes else known[key] for key in self._gives)
        return given[0] if len(given) == 1 else given

    def train(self, mode: bool = True) -> GraphPiece:
        self.training = mode
        return self

    def share_tensors(self) -> None:
        """Give the tensors of the graph for training to the graph for evaluation."""
        real = {slot.name: slot.tensor for slot in tensor_slots(self._graphs[True])}
        for slot in list(tensor_slots(self._graphs[False])):
            slot.fill({id(slot.tensor): real[slot.name]})


@dataclass(frozen=True)
class _Graph:
    """A traced model and the fake mode of its tensors."""

    pipe: Pipe
    mode: FakeTensorMode


def _trace(
    build: Callable[[], nn.Module], inputs: Any, device: torch.device, split: Sequence[str], training: bool
) -> _Graph:
    fresh = build_fake(build, device)  # a new one each time, because tracing modifies the model
    if not training:
        fresh.model.eval()
    try:
        with fresh.mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            example = pytree.tree_map_only(Tensor, fresh.fake_like, inputs)
            pipe = pipeline(fresh.model, (example,), split_spec={name: SplitPoint.BEGINNING for name in split})
    except Exception as e:
        reason = " ".join(str(e.__cause__ or e).split())[:300]
        raise ValueError(f"the model {type(fresh.model).__name__} cannot be cut: {reason}; {_ADVICE}") from e
    if pipe.num_stages != len(split) + 1:
        raise ValueError(
            f"the model {type(fresh.model).__name__} cannot be cut: {len(split)} cuts gave {pipe.num_stages} pieces; "
            f"{_ADVICE}"
        )
    return _Graph(pipe, fresh.mode)


def _with_flat_inputs(piece: nn.Module) -> nn.Module:
    """Let a piece take the tensors that it needs; the tracer's own first piece takes the model's nested input."""
    assert isinstance(piece, fx.GraphModule)
    piece.graph.set_codegen(fx.graph.CodeGen())
    piece.recompile()
    return piece


def _dataflow(pipe: Pipe) -> list[tuple[ValueKey, ...]]:
    """Return the values that each piece is called with, then those that the model returns."""
    keys: dict[fx.Node, ValueKey] = {}
    needs: list[tuple[ValueKey, ...]] = []
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            keys[node] = (-1, len(keys))
        elif node.op == "call_module":
            keys[node] = (len(needs), 0)
            needs.append(tuple(keys[argument] for argument in node.args))
        elif node.op == "call_function":  # selects one of several results
            keys[node] = (keys[node.args[0]][0], node.args[1])
        elif node.op == "output":
            needs.append(tuple(keys[leaf] for leaf in pytree.tree_leaves(node.args[0]) if leaf in keys))
    return needs


def _carried(needs: Sequence[tuple[ValueKey, ...]]) -> list[tuple[ValueKey, ...]]:
    """Return the values that flow into each piece: all that it or a later one needs from earlier ones."""
    return [
        tuple(sorted({key for later in needs[index:] for key in later if key[0] < index}))
        for index in range(len(needs))
    ]
