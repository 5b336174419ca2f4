"""What ``fully_shard`` gathers and sums where ranks use different parts of a model, such as experts or skipped blocks.

torch gathers the parameters of a module that is called, and sums the gradients that exist. All ranks of a group have to
do both for the same modules, in one order, or they add up different tensors, or wait for each other. Here, a rank
gathers what it skips as well, in the order of :attr:`Calls.order`, and its missing gradients are zeros in the sums.

Autograd runs the operations of a backward pass in the reverse order of the forward pass. So once it has come to a
module, all that was called after it has its gradients, or will have none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._pytree import tree_leaves


@dataclass(kw_only=True, eq=False)
class _Call:
    """A call of the modules of a group in a forward pass.

    Attributes:
        first: the number of the first call inside of it.
        backward: whether the backward pass has still to come to it, is in it, or is past it. Of a module that this
            rank has skipped, it is known at the end of the forward pass.
    """

    group: _Group
    first: int
    backward: Literal["skipped", "to come", "running", "past"]


@dataclass(kw_only=True)
class _Frame:
    """A module that runs.

    Attributes:
        order: the groups that are called in it, in their order, over and over again.
        position: the number of calls that there have been.
        agreed: up to which of them it is known that other ranks make them too.
    """

    order: Sequence[_Group]
    position: int = 0
    agreed: int = 0

    def skipped_before(self, group: _Group) -> Sequence[_Group]:
        number = len(self.order)
        turned = (self.order[(self.position + i) % number] for i in range(number))
        skipped = list(itertools.takewhile(lambda other: other is not group, turned))
        return skipped if len(skipped) < number else ()

    def skipped_at_end(self) -> Sequence[_Group]:
        ahead = self.position % max(1, len(self.order))
        return self.order[ahead:] if ahead or not self.position else ()

    @property
    def begins_again(self) -> bool:
        """Whether it is not known that other ranks make the next call too."""
        return self.position > self.agreed and self.position % len(self.order) == 0  # without an order, it stays 0


@dataclass(kw_only=True, eq=False)
class Calls:
    """The calls of divided modules in the passes through a model, and the parameters that these have used.

    Attributes:
        order: the groups that are called in a module, in their order.
        recomputed: the modules that no rank may skip, because they are called again in the backward pass.
        ranks: those that may call the modules unequally often; None if they do not.
        frozen: the groups without trained parameters.
        used: the parameters of which this rank has had a gradient since the last :meth:`take_used`.
        frames: the modules that run in a forward pass, the innermost last.
        forward: the calls of this pass, in the order of their ends.
        backward: the calls of the forward pass whose backward pass runs.
    """

    order: Mapping[nn.Module, Sequence[_Group]] = field(default_factory=dict)
    recomputed: Collection[nn.Module] = ()
    ranks: dist.ProcessGroup | None = None
    frozen: Sequence[_Group] = ()
    used: set[nn.Parameter] = field(default_factory=set)
    frames: list[_Frame] = field(default_factory=list)
    forward: list[_Call] = field(default_factory=list)
    backward: list[_Call] = field(default_factory=list)

    def take_used(self) -> set[nn.Parameter]:
        """Return the parameters of which this rank has had a gradient since the last call."""
        used, self.used = self.used, set()
        return used

    def watch(
        self,
        root: nn.Module,
        order: Mapping[nn.Module, Sequence[nn.Module]],
        called: Sequence[nn.Module],
        recomputed: Collection[nn.Module],
        ranks: dist.ProcessGroup | None,
    ) -> None:
        """Keep to one order.

        Args:
            root: the divided module that has all others.
            order: the divided modules that are called in the ``called`` ones, and in each other.
            called: the modules that are called as a whole.
            recomputed: the modules that may be called again in the backward pass, inside of others.
            ranks: those that are asked, after a forward pass, whether one calls the modules again; None if they call
                them equally often.
        """
        self.recomputed, self.ranks = recomputed, ranks
        divided: Any = [module for module in root.modules() if isinstance(module, FSDPModule)]
        state_of = {module: module._get_fsdp_state() for module in divided}
        for state in state_of.values():
            for group in groups_of_state(state):
                group.__class__ = _Root if state is state_of[root] else _Group
                group.calls, group.state = self, state
        groups = _groups_in(state for module, state in state_of.items() if module is not root)
        self.frozen = [group for group in groups if not group.is_trained]
        self.order = {module: _groups_in(state_of[inner] for inner in inners) for module, inners in order.items()}
        for module in called:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, prepend=True)
        final: Any = state_of[root]
        final._root_post_backward_final_callback = functools.partial(
            self._finish, final._root_post_backward_final_callback
        )

    def enter(self, group: _Group) -> None:
        """Gather what this rank has skipped before a module is called."""
        if self.frames:
            frame = self.frames[-1]
            for other in frame.skipped_before(group):
                self._skip(other)
            if group in frame.order:
                self._goes_on(frame, wanted=True)
                frame.position += 1
        group.entered = len(self.forward)
        if group.is_alone:
            self.frames.append(_Frame(order=self.order.get(group.modules[0], ())))

    def leave(self, group: _Group, output: Any) -> None:
        """Gather what this rank has skipped inside of a module."""
        if group.is_alone and self.frames:
            self._end_frame()
        passes = self._follow_back(output)
        if torch.is_grad_enabled():
            group.passes_gradient |= passes
        self.forward.append(_Call(group=group, first=group.entered, backward="to come" if passes else "past"))

    def turn_back(self, group: _Group) -> None:
        """Begin the backward pass of a call, and end those of all later ones."""
        for number in reversed(range(len(self.backward))):
            call = self.backward[number]
            if call.group is group and call.backward == "to come":
                self._pass_back(later for later in self.backward[number + 1 :] if later.first > number)
                call.backward = "running"
                return

    def pass_by(self, group: _Group) -> None:
        """End the backward pass of a call, and before it those of all calls inside of it."""
        for number in reversed(range(len(self.backward))):
            call = self.backward[number]
            if call.group is group and call.backward == "running":
                call.backward = "past"
                if group.is_alone:
                    self._pass_back(self.backward[call.first : number])
                break
        while self.backward and self.backward[-1].backward == "past":  # so that no call searches among all
            self.backward.pop()

    def pass_all(self) -> None:
        """End the backward pass of all calls."""
        self._pass_back(self.backward)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self.forward = []
        self.frames = [_Frame(order=self.order.get(module, ()))]

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._end_frame()
        for call in self.forward:
            if call.backward == "skipped":
                comes = torch.is_grad_enabled() and (call.group.is_trained or call.group.passes_gradient)
                call.backward = "to come" if comes else "past"
        self._follow_back(output)

    def _end_frame(self) -> None:
        frame = self.frames[-1]
        for group in frame.skipped_at_end():
            self._skip(group)
        while self._goes_on(frame, wanted=False):
            for group in frame.order:
                self._skip(group)
        self.frames.pop()

    def _goes_on(self, frame: _Frame, *, wanted: bool) -> bool:
        """Return whether a rank calls the modules of a frame again, once all of them have been called.

        The ranks also tell each other through which frozen modules their gradients pass.
        """
        if self.ranks is None or not frame.begins_again:
            return wanted
        frame.agreed = frame.position
        own = [wanted, *(group.passes_gradient for group in self.frozen)]
        votes = torch.tensor(own, dtype=torch.uint8, device=frame.order[0].device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.ranks)
        goes_on, *passes = votes.tolist()
        for group, passes_gradient in zip(self.frozen, passes, strict=True):
            group.passes_gradient = bool(passes_gradient)
        return bool(goes_on)

    def _skip(self, group: _Group) -> None:
        """Gather the parameters of a module that does not run, and those inside of it."""
        number, module = len(self.forward), group.modules[0]
        if torch.is_grad_enabled():
            self._refuse_recomputed(group)
        group.state._pre_forward(module, (), {})
        group.state._post_forward(module, (), None)
        for call in self.forward[number:]:
            call.backward = "skipped"

    def _follow_back(self, output: Any) -> bool:
        """Let the backward pass through an output be that of the calls of this pass; return whether there will be one.

        torch registers its own hooks of a module later, so that they run later.
        """
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in tensors:
            tensor.register_hook(functools.partial(self._begin_backward, self.forward))
        return bool(tensors)

    def _begin_backward(self, calls: list[_Call], gradient: Tensor) -> None:
        self.backward = calls

    def _finish(self, final: Any) -> None:
        self.pass_all()
        self.backward = []
        final()

    def _pass_back(self, calls: Iterable[_Call]) -> None:
        for call in reversed([*calls]):
            if call.backward == "to come":
                self._refuse_recomputed(call.group)
                call.group.state._pre_backward(None)
            if call.backward == "running":
                call.group.post_backward()

    def _refuse_recomputed(self, group: _Group) -> None:
        if group.modules[0] in self.recomputed:
            raise ValueError(
                f"strategy.wrap: no sample of a batch uses {group._module_fqn}, in a block that is computed again in "
                "the backward pass, where workers would gather different modules; set strategy.wrap=auto, which "
                "gathers blocks as a whole, or train.activation_checkpointing=none"
            )


class _OfSeveralTypes(FSDPParamGroup):
    """Parameters that are gathered together, and may have several dtypes, which torch refuses."""

    def _init_mp_dtypes(self) -> None:
        every: list[Any] = self.fsdp_params
        if not hasattr(every[0], "summed"):  # they have one dtype
            super()._init_mp_dtypes()
            return
        trained = {p.sharded_param.dtype for p in every if p.sharded_param.requires_grad}
        dtypes = dict.fromkeys(p.sharded_param.dtype for p in every)
        for dtype in sorted(dtypes, key=trained.__contains__):  # what torch notes last is of trained ones
            self.fsdp_params = [p for p in every if p.sharded_param.dtype == dtype]
            super()._init_mp_dtypes()
        self.fsdp_params = every
        self._orig_dtype = every[0].summed  # up to torch 2.13, that of all gradients


class _Summed(_OfSeveralTypes):
    """Parameters that are gathered together, and whose gradients exist on all ranks when they are summed.

    Attributes:
        calls: of all groups.
        state: has the group.
    """

    calls: Calls
    state: Any

    def post_backward(self, *unused: Any) -> None:
        if self.reduce_grads:
            for parameter in self.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is None or not parameter.sharded_param.requires_grad:
                    continue
                if whole.grad is None and getattr(parameter, "unsharded_accumulated_grad", None) is None:
                    whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
                else:
                    self.calls.used.add(parameter.sharded_param)
        super().post_backward(*unused)


class _Root(_Summed):
    """The parameters of the root, which no rank skips."""

    def post_backward(self, *unused: Any) -> None:
        self.calls.pass_all()
        super().post_backward(*unused)


class _Group(_Summed):
    """Parameters that are gathered together, and which a rank may skip.

    Attributes:
        entered: the number of calls that have ended before the present one.
        passes_gradient: whether a call has had an output with a gradient.
    """

    entered = 0
    passes_gradient = False

    @property
    def is_alone(self) -> bool:
        """Whether all parameters are those of one module."""
        return len(self.modules) == 1

    @property
    def is_trained(self) -> bool:
        return any(parameter.sharded_param.requires_grad for parameter in self.fsdp_params)

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._training_state != TrainingState.FORWARD and not is_bw():
            self.calls.enter(self)
        return super().pre_forward(module, args, kwargs)

    def post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        if not is_bw():
            self.calls.leave(self, output)
        return super().post_forward(module, input, output)

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        if self._training_state != TrainingState.PRE_BACKWARD:
            self.calls.turn_back(self)
        super().pre_backward(default_prefetch, *unused)

    def post_backward(self, *unused: Any) -> None:
        self.calls.pass_by(self)
        super().post_backward(*unused)


def groups_of_state(state: Any) -> list[Any]:
    """Return what is gathered together, of the state of a divided module."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # up to torch 2.11


def _groups_in(states: Iterable[Any]) -> list[_Group]:
    """Return the groups of states that are called one after the other; one of several modules is gathered once."""
    found: list[_Group] = []
    for group in (group for state in states for group in groups_of_state(state)):
        if group.is_alone or group not in found:
            found.append(group)
    return found
