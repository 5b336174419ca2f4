"""Training state that passes from rank to rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.conformance.training import assert_same, make, snapshot, steps
from helpers.jobs.quick_jobs import AdamDigits
from helpers.ranks.gang import Gang, own_device
from orchestrator.compat.torch import TorchDispatchMode, version_of
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import MESSAGE_BYTES, broadcast_tensors, receive_state, send_state
from orchestrator.strategies.trainer import Trainer


def state() -> TrainState:
    torch.manual_seed(0)
    return TrainState(
        model={
            "weight": torch.randn(300, 400),
            "table": torch.randn(MESSAGE_BYTES // 4 + 5),
            "bias": torch.randn(400, dtype=torch.bfloat16),
            "mask": torch.tensor([True, False]),
        },
        optimizer={"bias/step": torch.tensor(7.0), "nothing/exp_avg": torch.empty(0), "weight/exp_avg": torch.ones(3)},
        meta={"step": 7, "samples_consumed": 70},
    )


def pass_on(rank: int, reuse: bool) -> tuple[TrainState | None, bool]:
    """What rank 1 receives, and whether it took the memory that it was given."""
    if rank == 0:
        send_state(state(), to=1, device=own_device())
        return None, False
    into = state() if reuse else None
    if into is not None:
        for tensor in (*into.model.values(), *into.optimizer.values()):
            tensor.zero_()
    received = receive_state(0, device=own_device(), into=into)
    kept = into is not None and all(received.model[n].data_ptr() == t.data_ptr() for n, t in into.model.items())
    return received, kept


def broadcast_from_1(rank: int) -> list[torch.Tensor]:
    """Tensors of several types and layouts, after the broadcast; those of rank 1 are nonzero."""
    torch.manual_seed(0)
    tensors = [torch.tensor([True]), torch.randn(3).bfloat16(), torch.randn(()), torch.randn(4, 6).t(), torch.empty(0)]
    for tensor in tensors if rank == 0 else ():
        tensor.zero_()
    broadcast_tensors(tensors, source=1, device=own_device())
    return tensors


def assert_arrives_as_sent(gang: Gang, *, reuse: bool) -> None:
    """Send a state to rank 1, which gives memory for its tensors if ``reuse``."""
    received, kept = gang.run(pass_on, reuse, world_size=2)[1]
    sent = state()
    assert kept == reuse
    assert received.meta == sent.meta
    for part in ("model", "optimizer"):
        ours, theirs = getattr(received, part), getattr(sent, part)
        assert list(ours) == list(theirs)
        assert [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])] == []


def recovered_by(
    rank: int, case: Case, sources: Sequence[int], own_step: int
) -> tuple[set[int], set[str], dict[str, Tensor]]:
    """Recover after two steps. Ranks with another source have made ``own_step`` of them, 0 because they are new.

    Returns:
        By how much the version counters of this rank's parameters have grown; the operators that have copied tensors;
        and the model.
    """
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)
    for result in steps(strategy, last=2):
        result.loss_sum.item()
    step = 2 if sources[rank] == rank else own_step
    if step < 2:
        with torch.no_grad():
            for parameter in strategy.trained.parameters:
                parameter.add_(1)
    before = [version_of(parameter) for parameter in strategy.trained.parameters]
    batch = case.train.global_batch_size
    with Copies() as copies:
        meta = strategy.recover_state(sources, source_step=2, step=step, samples_consumed=step * batch)
    assert (meta["step"], meta["samples_consumed"]) == (2, 2 * batch)
    grown = {version_of(parameter) - old for parameter, old in zip(strategy.trained.parameters, before, strict=True)}
    return grown, copies.seen, snapshot(strategy.trained.module())


class Copies(TorchDispatchMode):
    """Sees copies of tensors of more than a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in (*args, result) if isinstance(value, Tensor)]
        name = func.name()
        if func.namespace == "aten" and ("copy" in name or "clone" in name) and all(t.numel() > 100 for t in tensors):
            self.seen.add(name)
        return result


def assert_live_tensors_are_sent(gang: Gang, name: str, sources: Sequence[int], *, own_step: int) -> None:
    """Recover in the layout ``name``, in which each rank gets its state from one of the ``sources``."""
    case = LAYOUTS[name].of(Case(job=AdamDigits(hidden=24), train=having(steps=2, global_batch_size=24)))
    found = gang.run(recovered_by, case, sources, own_step, world_size=len(sources))
    for rank, (grown, copies, model) in enumerate(found):
        if sources[rank] == rank:
            assert grown == {0}, "a rank that has the state should keep it"
            assert copies == set(), "the tensors should be sent from where they are"
        else:
            assert 0 not in grown
            assert_same(model, found[sources[rank]][2])
