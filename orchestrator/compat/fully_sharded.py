"""``fully_shard`` of torch: local tensors, a dtype for each, sums instead of means, sums that wait, and its release.

Checked with torch 2.11, 2.13 and 2.15. Import it before process groups are formed: what it loads keeps the default
group of that time, with torch 2.11.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from orchestrator.compat.fully_sharded_calls import Calls, groups_of_state

Timed = Callable[[], contextlib.AbstractContextManager[None]]


class _Timed:
    def __init__(self, timed: Timed):
        self._timed = timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _AllGather(_Timed, DefaultAllGather):
    pass


class _ReduceScatter(_Timed, DefaultReduceScatter):
    pass


class _Parameter(FSDPParam):
    """A divided parameter with a policy of its own, which ``fully_shard`` takes from torch 2.15 on only.

    Attributes:
        gathered: the dtype in which its parts are gathered.
        summed: the dtype in which gradients are summed, the same for all parameters that are gathered together.
    """

    gathered: torch.dtype
    summed: torch.dtype

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        super().init_dtype_attrs(MixedPrecisionPolicy(param_dtype=self.gathered, reduce_dtype=self.summed))
        self.reduce_dtype = self.summed  # None in torch 2.11 and 2.13, where it equals the dtype of the parameter

    def init_unsharded_param(self) -> None:
        super().init_unsharded_param()  # type: ignore[no-untyped-call]
        # Before torch 2.15, all gradients of a group must have one dtype, and several passes add up in theirs.
        self._unsharded_param.grad_dtype = self.reduce_dtype


class FullySharded:
    """A model whose parameters are divided over the ranks of a group, along their first dimensions."""

    def __init__(
        self,
        root: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        keep_whole: bool,
        all_at_once: bool,
        offload: bool,
        undivided: Sequence[nn.Parameter],
        dtypes: Callable[[nn.Module], Mapping[Tensor, torch.dtype]] | None,
        gathering: Timed,
        scattering: Timed,
    ):
        """Prepare for :meth:`gather_together`, which the ``root`` is given to last.

        Args:
            root: the module that is called.
            device: where the parameters are.
            keep_whole: whether what a step has gathered is kept up to its end, and gradients are summed over its
                slices before they are summed over the ranks.
            all_at_once: whether passes need all parameters and all gradients whole. Only with ``keep_whole``.
            offload: whether parts and their gradients are in host memory, whatever ``device`` is.
            undivided: parameters that stay as they are.
            dtypes: returns the dtype in which each parameter of a module is gathered; None to gather them as they are.
                Gradients of what is gathered in several dtypes, or in another one, are summed in float32 or float64.
            gathering: returns a context around each gathering of parameters, on the stream that gathers.
            scattering: the same of each sum of gradients.
        """
        self._root: Any = root
        self._mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))
        self._keep_whole = keep_whole
        self._all_at_once = all_at_once
        self._offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
        self._undivided = set(undivided)
        self._dtypes = dtypes
        self._gather, self._scatter = _AllGather(gathering), _ReduceScatter(scattering)
        self._calls = Calls()

    def gather_together(self, modules: Sequence[nn.Module]) -> None:
        """Divide the parameters of ``modules`` that are not divided yet, and gather them together when they are used.

        The parameters have memory, and any values.
        """
        divided: Any = list(modules)
        # In a list, torch waits for all of the modules. The root keeps what the backward pass needs first.
        fully_shard(
            divided if len(divided) > 1 else divided[0],
            mesh=self._mesh,
            reshard_after_forward=False if self._keep_whole else None if modules[0] is self._root else True,
            offload_policy=self._offload,
            ignored_params=self._undivided,
        )
        for module in divided:
            # Neither setter reaches the modules below.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            module.set_custom_all_gather(self._gather)
            module.set_custom_reduce_scatter(self._scatter)
            module.register_forward_hook(_keep_unfrozen, prepend=True)  # before its parameters are freed
        dtypes = {p: d for module in divided for p, d in self._dtypes(module).items()} if self._dtypes else {}
        for group in _groups_of(divided):
            together = [p.sharded_param for p in group.fsdp_params]
            if not dtypes and len({parameter.dtype for parameter in together}) == 1:
                continue
            trained = (parameter.dtype for parameter in together if parameter.requires_grad)
            summed = functools.reduce(torch.promote_types, trained, torch.float32)
            for parameter in group.fsdp_params:
                parameter.__class__ = _Parameter
                parameter.gathered = dtypes.get(parameter.sharded_param, parameter.sharded_param.dtype)
                parameter.summed = parameter.sharded_param.grad_dtype = summed

    def gather_in_order(
        self,
        order: Mapping[nn.Module, Sequence[nn.Module]],
        called: Sequence[nn.Module],
        *,
        recomputed: Collection[nn.Module],
        equally_often: bool,
    ) -> None:
        """Gather what a pass skips too, and sum gradients that a rank lacks as zeros, as other ranks have them.

        Args:
            order: the divided modules that each of the ``called`` ones calls, directly or through others.
            called: the modules that are called.
            recomputed: those that may be called again in the backward pass, inside of others; a rank that skips one of
                them in training raises a ValueError.
            equally_often: whether all ranks call them equally often. If not, each forward pass ends with a question to
                the other ranks, for which it waits for the device.
        """
        self._calls.watch(self._root, order, called, recomputed, None if equally_often else self._mesh.get_group())

    def take_used(self) -> set[nn.Parameter]:
        """Return the divided parameters of which this rank has had a gradient since the last call."""
        return self._calls.take_used()

    @staticmethod
    def gather_ahead(root: nn.Module, count: int) -> None:
        """Gather the parameters of the ``count`` next modules while one runs, in the order that ``root`` has them in.

        Without this, torch gathers the next one in a backward pass, and in a forward pass as early as the host gets
        there.
        """
        modules: list[Any] = [m for m in root.modules() if isinstance(m, FSDPModule)]
        if count == 0:
            for module in modules:  # without a list, torch takes the next one; the module itself is there already
                module.set_modules_to_backward_prefetch([module])
            return
        blocks = [module for module in modules if module is not root]
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + count])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - count) : i][::-1])

    @contextlib.contextmanager
    def around_slice(self, *, last: bool) -> Iterator[None]:
        """Run the passes of a slice of a step; ``last``: the last one."""
        if self._all_at_once:
            self.gather_all()
            self.keep_gradients()
        elif self._keep_whole:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)
        yield
        if self._all_at_once and last:
            self.sum_gradients()

    def gather_all(self) -> None:
        """Gather what is not gathered yet before a pass, if it needs all parameters."""
        for module in self._modules() if self._all_at_once else ():
            module.unshard()

    def keep_gradients(self) -> None:
        """Let backward passes add up gradients on this rank, whole, until :meth:`sum_gradients`."""
        self._set_sums(False)
        if hasattr(self._root, "set_manual_backward_finalization"):  # from torch 2.15
            self._root.set_manual_backward_finalization(True)

    def sum_gradients(self) -> None:
        """Sum the gradients of all passes since the last call, and free what the passes have gathered."""
        self._set_sums(True)
        if hasattr(self._root, "finalize_backward"):
            self._root.finalize_backward()
        else:  # as torch's own pipelines do
            for group in self._groups():
                group.post_backward()
            self._root._get_fsdp_state()._root_post_backward_final_callback()
        self.keep_gradients()

    def _set_sums(self, last: bool) -> None:
        self._root.set_is_last_backward(last)
        self._root.set_requires_gradient_sync(last)
        self._root.set_reshard_after_backward(last or not self._keep_whole)

    def free(self) -> None:
        """Free what passes without a backward pass have gathered, and what they gathered ahead and did not use."""
        for group in self._groups():
            group.wait_for_unshard()
        for module in self._modules():
            module.reshard()

    def release(self) -> None:
        """Drop what refers to the process group, so that its connections close. The model cannot run afterwards."""
        with contextlib.suppress(AttributeError, RuntimeError):  # before torch 2.12, and before the first pass
            self._root.reset_iter_state()  # what an error has left
        for group in self._groups():
            for info in (group.mesh_info, group.post_forward_mesh_info):
                if info is not None:
                    info.shard_process_group = None
        # Equal meshes are different objects.
        for mesh in (self._mesh, *(p.device_mesh for p in self._root.parameters() if isinstance(p, DTensor))):
            registry: dict[str, Any] = getattr(mesh, "_pg_registry", {})
            registry.clear()
        self._calls.ranks = None
        del self._root, self._mesh

    @staticmethod
    @torch.no_grad()
    def local_part(tensor: Tensor) -> Tensor:
        """Return this rank's part of a divided parameter or of its gradient, in the same memory."""
        assert isinstance(tensor, DTensor)
        return tensor.to_local()

    def _modules(self) -> list[FSDPModule]:
        return [module for module in self._root.modules() if isinstance(module, FSDPModule)]

    def _groups(self) -> list[Any]:
        return _groups_of(self._modules())


def _keep_unfrozen(module: Any, args: Any, out: Any) -> None:
    """Let divided parameters need a gradient if the forward pass of ``module`` has made that of the gathered ones."""
    for parameter in (p for group in _groups_of([module]) for p in group.fsdp_params):
        if not parameter.sharded_param.requires_grad and parameter.unsharded_param.requires_grad:
            parameter.sharded_param.requires_grad_()


def _groups_of(modules: Sequence[FSDPModule]) -> list[Any]:
    """Return what is gathered together, of divided modules."""
    return list(dict.fromkeys(group for module in modules for group in groups_of_state(module._get_fsdp_state())))
