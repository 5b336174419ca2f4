"""The training state from one rank to all, through the process group and without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.worker.state import TrainState


def broadcast_state(state: TrainState | None, *, source: int, rank: int, device: torch.device) -> TrainState:
    """Every rank returns what ``source`` passes; the others pass None. Uses the default group."""
    header: dict[str, Any] = {}
    if rank == source:
        assert state is not None
        header = {
            "meta": state.meta,
            "model": [_spec(n, t) for n, t in state.model.items()],
            "optimizer": [_spec(n, t) for n, t in state.optimizer.items()],
        }
    header = _broadcast_json(header, source=source, rank=rank, device=device)
    parts: dict[str, dict[str, Tensor]] = {}
    for part in ("model", "optimizer"):
        mine = getattr(state, part) if rank == source else {}
        parts[part] = {
            name: _broadcast_tensor(mine.get(name), shape, dtype, source=source, device=device)
            for name, shape, dtype in header[part]
        }
    return TrainState(meta=header["meta"], **parts)


def _spec(name: str, tensor: Tensor) -> tuple[str, list[int], str]:
    return name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _broadcast_tensor(
    tensor: Tensor | None, shape: list[int], dtype: str, *, source: int, device: torch.device
) -> Tensor:
    if tensor is None:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    moved = tensor.to(device)
    # As bytes: not every backend knows every dtype.
    dist.broadcast(moved.view(-1).view(torch.uint8), src=source)
    return moved


def _broadcast_json(value: Any, *, source: int, rank: int, device: torch.device) -> Any:
    text = json.dumps(value).encode() if rank == source else b""
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, src=source)
    data = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8).to(device)
    dist.broadcast(data, src=source)
    return json.loads(bytes(data.cpu().tolist()))
