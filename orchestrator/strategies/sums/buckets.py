"""Sums in the backward pass, bucket by bucket, of whole models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from orchestrator.compat.modules import ddp_comm_ms, release_ddp, set_ddp_timing, without_buffer_broadcasts
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.replicated.comm_hooks import PowerSGD, average, average_in
from orchestrator.strategies.replicated.ddp_options import bucket_arguments
from orchestrator.strategies.replicated.sync_batchnorm import SyncBatchNorm
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.update.job_optimizer import sparse_parameters
from orchestrator.strategies.whole_model import WholeModel


class Buckets(Sums):
    """``DistributedDataParallel``: sums bucket by bucket, overlapped with the last backward pass of a step.

    Attributes:
        replica: the wrapped model; deleted by :meth:`close`.
    """

    learns = True
    _timed = False

    def __init__(self, passes: WholeModel, context: Context, powersgd: PowerSGD | None, norms: Sequence[SyncBatchNorm]):
        """Wrap the model. Collective.

        Args:
            passes: through the model.
            powersgd: compresses the buckets, unless None.
            norms: the modules that wait for other ranks by themselves.
        """
        self._norms = norms
        self._passes = passes
        self._parameters = [p for p in passes.model.parameters() if p.requires_grad]
        self._options = options = MeshConfig.of(context.options)
        # DDP divides gradients by the number of ranks, and a sum is needed: the loss has its global weight already.
        self.averages_over = context.mesh.world_size
        # At this level, DDP's errors name the parameters concerned.
        dist.set_debug_level(dist.DebugLevel.INFO)
        self.replica = replica = DistributedDataParallel(
            passes.unwrapped,
            device_ids=None if context.device.type == "cpu" else [context.device],
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,  # ranks may still be at different steps
            **bucket_arguments(self._parameters, options.bucket_mb, device=context.device.type),
            **without_buffer_broadcasts(),  # evaluation comes before the next forward pass
        )
        passes.forward_model = replica
        # Lambdas, because DDP compares a hook's annotations with types, and here annotations are strings.
        if options.comm_hook in ("bf16", "fp16"):
            dtype = torch.bfloat16 if options.comm_hook == "bf16" else torch.float16
            replica.register_comm_hook(dtype, lambda dtype, bucket: average_in(dtype, bucket))
        elif powersgd is not None:
            replica.register_comm_hook(powersgd, lambda powersgd, bucket: powersgd.average(bucket))
        elif sparse_parameters([passes.model]):
            replica.register_comm_hook(None, lambda _, bucket: average(bucket))

    def restart(self, *, counts: bool) -> None:
        # DDP synchronises with the device to read its timers, so they are sampled only in steps that are logged.
        self._timed = counts
        set_ddp_timing(self.replica, enabled=counts)
        for norm in self._norms:
            norm.waited_s = 0.0

    def comm_ms(self) -> float | None:
        gradients_ms = ddp_comm_ms(self.replica) if self._timed else None
        return None if gradients_ms is None else gradients_ms + 1e3 * sum(norm.waited_s for norm in self._norms)

    @contextlib.contextmanager
    def around_slice(self, *, last: bool) -> Iterator[None]:
        """Sum the gradients in the backward pass of the last slice alone."""
        # The forward pass must be inside as well, because DDP decides there whether to synchronise.
        with contextlib.nullcontext() if last else self.replica.no_sync():
            try:
                yield
            except RuntimeError as e:
                # A parameter was used in an earlier slice of the previous step, but not in its last one.
                if "finished reduction in the prior iteration" not in str(e):
                    raise
                raise ValueError(f"set strategy.find_unused_parameters=true: {e}") from e

    def finish(self, waits: WaitTimer) -> None:
        if not self._options.find_unused_parameters and any(p.grad is None for p in self._parameters):
            named, own = self._passes.model.named_parameters(), {*self._parameters}
            unused = [n for n, p in named if p in own and p.grad is None]
            raise ValueError(
                f"parameters that take no part in the loss: {', '.join(unused)}; the other ranks would wait for "
                "their gradients. Use them, freeze them (requires_grad=False), or set "
                "strategy.find_unused_parameters=true"
            )

    def close(self) -> None:
        """Unwrap the model. Nothing may refer to the process group then.

        Its connections then close, which frees the ranks that wait for this one. If the reducer were the last owner of
        the group, its destructor would wait for gloo's threads while it holds the GIL, which they may be waiting for.
        """
        self._passes.forward_model = self._passes.unwrapped
        release_ddp(self.replica)
        del self.replica
