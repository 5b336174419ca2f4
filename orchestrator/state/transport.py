"""Transport of training state between ranks through the process group, without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.compat.torch import as_bytes, copy_all
from orchestrator.planning.placement import Box
from orchestrator.state.manifest import Kind
from orchestrator.state.tensor_memory import runs_of
from orchestrator.state.train_state import TrainState, outline

CPU = torch.device("cpu")
"""Host memory, where snapshots are kept and from which gloo sends."""

MESSAGE_BYTES = 4 * 2**20
"""Small tensors are packed into messages of up to this size."""


def broadcast_state(
    state: TrainState | None,
    *,
    source: int,
    rank: int,
    device: torch.device,
    onto: torch.device = CPU,
    into: TrainState | None = None,
    keep: Callable[[str], bool] = lambda name: True,
    boxes: Mapping[str, Box] | None = None,
) -> TrainState:
    """Broadcast a state through the default group. A collective operation.

    Args:
        state: the state to send on ``source``, which is returned there; None on the other ranks.
        device: the device that the backend sends from and receives on, one tensor at a time.
        onto: the device on which this rank keeps what it receives.
        into: whose memory receives what is kept, where device, shape and dtype fit.
        keep: whether this rank keeps the tensors of a parameter or buffer, by its name. The others are dropped one by
            one as they are sent or arrive.
        boxes: which shards of parameters this rank keeps, by name, and of the optimizer's tensors of the same shape.
    """
    boxes = boxes or {}
    header: dict[str, Any] = {}
    if rank == source:
        assert state is not None
        header = _header(state)
    header = broadcast_json(header, source=source, rank=rank, device=device)
    parts: dict[Kind, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    where: dict[Kind, dict[str, Box]] = {"model": {}, "optimizer": {}}
    for part, tensors in parts.items():
        own = getattr(state, part) if rank == source else {}
        old = getattr(into, part) if into else {}
        for path, shape, dtype in header[part]:
            name = path if part == "model" else path.rpartition("/")[0]
            kept = keep(name)
            buffer = old.get(path) if kept else None
            moved = own[path].to(device) if rank == source else _buffer(buffer, shape, dtype, device)
            dist.broadcast(as_bytes(moved), src=source)
            if rank == source and (boxes or not kept):
                del own[path]
            if not kept or (rank == source and not boxes):
                continue
            box = boxes.get(name)
            if box is None or box.full != tuple(shape):
                tensors[path] = moved.to(onto)
            else:
                where[part][path] = box
                tensors[path] = moved[box.slices_in(Box.whole(shape))].to(onto, copy=True)
    if state is not None and not boxes:
        return state
    divided = {kind: found for kind, found in where.items() if found}
    return TrainState(meta=header["meta"], model=parts["model"], optimizer=parts["optimizer"], boxes=divided)


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[Tensor], *, source: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Replace the values of ``tensors`` by the values of one rank. A collective operation.

    Args:
        tensors: tensors of the same shapes and dtypes on all ranks of ``group``, in the same order.
        source: the sending rank, by its number in ``group``.
        device: the device that the backend sends from and receives on.
        group: None for the default group.
    """
    own = list(tensors)
    sizes = [tensor.nbytes for tensor in own]
    for message in messages_of(sizes):
        parts = [as_bytes(tensor).to(device) for tensor in own[message]]
        whole = torch.cat(parts)
        dist.broadcast(whole, group=group, group_src=source)
        copy_all(whole.split(sizes[message]), to=parts)
        for tensor, part in zip(own[message], parts, strict=True):
            if part.data_ptr() != tensor.data_ptr():  # on another device, or with gaps between its rows
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def broadcast_json(value: Any, *, source: int, rank: int, device: torch.device) -> Any:
    """Broadcast the JSON ``value`` of ``source`` through the default group. A collective operation."""
    text = json.dumps(value).encode() if rank == source else b""
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, src=source)
    data = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8).to(device)
    dist.broadcast(data, src=source)
    return json.loads(bytes(data.cpu().tolist()))


def gather_json(value: Any, *, world_size: int, device: torch.device) -> list[Any]:
    """Return the JSON ``value`` of every rank of the default group, in rank order. A collective operation."""
    if world_size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device))
    lengths = [int(size) for size in sizes]
    padded = torch.nn.functional.pad(text, (0, max(lengths) - len(text)))
    texts = [torch.zeros_like(padded) for _ in range(world_size)]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(t[:length].cpu().tolist())) for t, length in zip(texts, lengths, strict=True)]


def gather_states(
    state: TrainState,
    *,
    ranks: Sequence[int],
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[TrainState] | None:
    """Collect the states of several ranks in host memory of the first one, point to point.

    Args:
        ranks: the ranks that take part; the first one receives.
        device: the device that the backend sends from.
        group: None for the default group.

    Returns:
        The states in the order of ``ranks`` on the first of them, None on the others.
    """
    if rank != ranks[0]:
        send_state(state, to=ranks[0], device=device, group=group)
        return None
    return [state, *(receive_state(sender, device=device, group=group) for sender in ranks[1:])]


def send_state(state: TrainState, *, to: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Send a state to a rank that calls :func:`receive_state`.

    Args:
        device: the device that the backend sends from.
        group: None for the default group.
    """
    _send_json(_header(state), to=to, device=device, group=group)
    tensors = [*state.model.values(), *state.optimizer.values()]
    for message in messages_of([t.nbytes for t in tensors]):
        parts = [as_bytes(t).to(device) for t in tensors[message]]
        dist.send(parts[0] if len(parts) == 1 else torch.cat(parts), dst=to, group=group)


def receive_state(
    sender: int,
    *,
    device: torch.device,
    onto: torch.device = CPU,
    into: TrainState | None = None,
    group: dist.ProcessGroup | None = None,
) -> TrainState:
    """Receive the state that ``sender`` passes to :func:`send_state`.

    Args:
        device: the device that the backend receives on.
        onto: the device on which the state is kept.
        into: a state whose memory is reused where it is on ``onto`` and shapes and dtypes fit.
        group: None for the default group.
    """
    header = _receive_json(sender, device=device, group=group)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for part, tensors in parts.items():
        old = getattr(into, part) if into else {}
        for path, shape, dtype in header[part]:
            tensors[path] = _buffer(old.get(path), shape, dtype, onto)
    received = [as_bytes(t) for tensors in parts.values() for t in tensors.values()]
    sizes = [t.nbytes for t in received]
    for message in messages_of(sizes):
        own = received[message]
        in_place = len(own) == 1 and device.type == onto.type
        whole = own[0] if in_place else torch.empty(sum(sizes[message]), dtype=torch.uint8, device=device)
        dist.recv(whole, src=sender, group=group)
        if not in_place:
            for buffer, values in zip(own, whole.split(sizes[message]), strict=True):
                buffer.copy_(values)
    return _received(header, parts)


def messages_of(sizes: Sequence[int]) -> Iterator[slice]:
    """Group consecutive tensors of these sizes in bytes into messages of up to ``MESSAGE_BYTES``.

    Fewer messages are better because each one takes the GIL from the training thread.
    """
    return runs_of(sizes, most=MESSAGE_BYTES)


def _header(state: TrainState) -> dict[str, Any]:
    return {
        "meta": state.meta,
        "model": [_spec(n, t) for n, t in outline(state.model).items()],
        "optimizer": [_spec(n, t) for n, t in outline(state.optimizer).items()],
        "boxes": {
            kind: {name: [box.full, box.ranges] for name, box in boxes.items()} for kind, boxes in state.boxes.items()
        },
    }


def _received(header: dict[str, Any], parts: dict[str, dict[str, Tensor]]) -> TrainState:
    boxes: dict[Kind, dict[str, Box]] = {
        kind: {
            name: Box(full=tuple(full), ranges=tuple(tuple(map(tuple, of_axis)) for of_axis in ranges))
            for name, (full, ranges) in found.items()
        }
        for kind, found in header["boxes"].items()
    }
    return TrainState(meta=header["meta"], model=parts["model"], optimizer=parts["optimizer"], boxes=boxes)


def _spec(name: str, tensor: Tensor) -> tuple[str, list[int], str]:
    return name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _buffer(old: Tensor | None, shape: list[int], dtype: str, device: torch.device) -> Tensor:
    wanted = shape, getattr(torch, dtype), device
    # Of a tensor that is not contiguous, the bytes would be received in a copy.
    if old is not None and old.is_contiguous() and (list(old.shape), old.dtype, old.device) == wanted:
        return old
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _send_json(value: Any, *, to: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    text = json.dumps(value).encode()
    dist.send(torch.tensor([len(text)], device=device), dst=to, group=group)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), dst=to, group=group)


def _receive_json(sender: int, *, device: torch.device, group: dist.ProcessGroup | None) -> Any:
    size = torch.tensor([0], device=device)
    dist.recv(size, src=sender, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(data, src=sender, group=group)
    return json.loads(bytes(data.cpu().tolist()))
