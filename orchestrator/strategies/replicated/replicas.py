"""One module on several devices of one process: scatter, replicate, apply in threads, gather.

On GPUs this uses ``torch.nn.parallel``. On a CPU, where ``torch.nn.DataParallel`` calls the module directly and splits
nothing, the same steps run on threads, with replicas that share the parameters, so that autograd sums their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate

from orchestrator.compat.modules import data_parallel_replica, own_buffers, own_children, own_parameters
from orchestrator.model.batch import join, map_tensors, num_rows, rows_between, to_device

T = TypeVar("T")


class Replicas:
    """Runs a function on replicas of a model, one per device, at the same time."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]):
        """``model`` holds the parameters and is on the first of ``devices``."""
        self._model = model
        self._devices = list(devices)
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="replica")

    def scatter(self, value: Any) -> list[Any]:
        """Cut nested tensors along their first dimension into one piece per device and move each piece there.

        Returns:
            Consecutive pieces of nearly equal size; fewer than there are devices if there are too few rows.
        """
        rows = num_rows(value)
        if rows is None:
            raise ValueError("the batch has no tensors that strategy=dp could divide among the devices")
        pieces = [
            rows_between(value, int(numbers[0]), int(numbers[-1]) + 1)
            for numbers in torch.arange(rows).chunk(len(self._devices))
        ]
        if self._devices[0].type == "cpu":  # a replica may change its piece in place, and autograd counts such changes
            return [map_tensors(Tensor.clone, piece) for piece in pieces]
        return [to_device(piece, device) for piece, device in zip(pieces, self._devices, strict=False)]

    def apply(self, function: Callable[..., Any], *pieces: Sequence[Any]) -> list[Any]:
        """Call ``function(replica, piece, ...)`` on every device, each in a thread.

        The threads take over the caller's gradient and autocast modes. An exception in a replica is raised here.
        """
        grad = torch.is_grad_enabled()
        device_type = self._devices[0].type
        autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

        def run(device: torch.device, *arguments: Any) -> Any:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with torch.set_grad_enabled(grad), torch.autocast(device_type, enabled=autocast[0], dtype=autocast[1]):
                return function(*arguments)

        replicas = self._replicate(len(pieces[0]))
        futures = [self._pool.submit(run, *work) for work in zip(self._devices, replicas, *pieces, strict=False)]
        return [future.result() for future in futures]

    def gather(self, outputs: Sequence[Any]) -> Any:
        """Join outputs of the same structure on the first device, as ``model.batch.join`` does."""
        return join(outputs, self._devices[0])

    def collect(self, values: Sequence[T]) -> list[T]:
        """Return ``values``, one of each replica, with their tensors on the first device."""
        return [to_device(value, self._devices[0]) for value in values]

    def close(self) -> None:
        """Stop the threads without waiting for them."""
        self._pool.shutdown(wait=False)

    def _replicate(self, count: int) -> list[nn.Module]:
        if self._devices[0].type == "cuda":
            return replicate(self._model, self._devices[:count], detach=not torch.is_grad_enabled())
        return [_copy_of(self._model, clone_buffers=number > 0) for number in range(count)]


def _copy_of(model: nn.Module, *, clone_buffers: bool) -> nn.Module:
    """Copy the tree of modules, but not its parameters, and no modules of TorchScript, which cannot be copied.

    ``clone_buffers``: copy the buffers, so that updates of them are lost, as on GPUs in all replicas but the first.
    """
    copies: dict[nn.Module, nn.Module] = {m: m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)}
    for module in [module for module in model.modules() if module not in copies]:
        copy = data_parallel_replica(module)
        own_parameters(copy).update(own_parameters(module))
        if clone_buffers:
            own_buffers(copy).update({n: None if b is None else b.clone() for n, b in own_buffers(module).items()})
        copies[module] = copy
    for module, copy in ((module, copy) for module, copy in copies.items() if copy is not module):
        own_children(copy).update({n: None if c is None else copies[c] for n, c in own_children(module).items()})
    return copies[model]
