"""DataParallel on threads: the losses of one worker, and exactly what is gathered on the first device."""

import contextlib
import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import DP, SGD
from helpers.conformance.training import losses, make, metrics_of, steps
from helpers.conformance.training import train as train_case
from helpers.jobs.quick_jobs import digits
from helpers.jobs.toys import Normed, Tokens, Toy
from orchestrator.features.asynchronous.dp import Replicas
from orchestrator.job import Job

TOY = having(global_batch_size=30)


@pytest.mark.in_turn
@pytest.mark.parametrize("loss_on", ["replicas", "device0"])
@pytest.mark.parametrize(("num_workers", "grad_accumulation"), [(2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("job", [digits(), Tokens(), Tokens(empty=6)], ids=["digits", "tokens", "empty-tokens"])
def test_equal_loss(job: Job, num_workers: int, loss_on: str, grad_accumulation: int) -> None:
    options = replace(DP, num_workers=num_workers, loss_on=loss_on)
    case = Case(job=job, train=having(global_batch_size=25, grad_accumulation=grad_accumulation), alone=options)
    got, expected = train_case(0, case), train_case(0, replace(case, alone=None))
    torch.testing.assert_close(losses([got]), losses([expected]), rtol=SGD, atol=0)
    torch.testing.assert_close(got.model, expected.model, rtol=100 * SGD, atol=10 * SGD)
    torch.testing.assert_close(metrics_of([got]), metrics_of([expected]), rtol=SGD, atol=0)


def test_values_of_replicas_are_added_on_the_first_device() -> None:
    """With fake tensors, which know their device and need no GPU."""
    devices = [torch.device("cuda", number) for number in range(2)]
    with FakeTensorMode():
        replicas = Replicas(nn.Identity(), devices)
        weights = [torch.ones(3, device=device).sum() for device in devices]
        assert sum(replicas.collect(weights)).device == devices[0]
    assert replicas.collect([3, 2.0]) == [3, 2.0]


@pytest.mark.parametrize(("loss_on", "gathered"), [("device0", 30 * 4 * 4), ("replicas", 2 * 4)])
def test_bytes_gathered_are_the_outputs_or_a_number_each(loss_on: str, gathered: int) -> None:
    strategy = make(Case(job=Toy(), train=TOY, alone=replace(DP, loss_on=loss_on)), 0)
    list(steps(strategy, last=3))
    assert strategy.metrics()["dp/gathered_bytes"].value == gathered


@pytest.mark.parametrize(("num_workers", "rows"), [(2, [15, 15]), (3, [10, 10, 10])])
def test_verbose_shows_sizes_inside_and_outside(num_workers: int, rows: list[int]) -> None:
    case = Case(job=Toy(), train=TOY, alone=replace(DP, num_workers=num_workers, verbose=True))
    strategy = make(case, 0)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        list(steps(strategy, last=1))
    inside = [f"in a replica: input [{n}, 10], output [{n}, 4]" for n in rows]
    assert sorted(out.getvalue().splitlines()) == sorted([*inside, "outside: input [30, 10], output [30, 4]"])


def test_valid_rows_alone_are_evaluated() -> None:
    strategy = make(Case(job=Toy(), train=TOY, alone=replace(DP, verbose=True)), 0)
    batch = (torch.zeros(30, 10), torch.zeros(30, dtype=torch.int64))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        strategy.evaluate(batch, 10)
    assert "in a replica: input [5, 10], output [5, 4]" in out.getvalue()
    assert "outside: input [10, 10], output [10, 4]" in out.getvalue()


def test_the_first_replica_keeps_its_buffers() -> None:
    strategy = make(Case(job=Normed(), train=TOY, alone=DP), 0)
    before = {n: b.clone() for n, b in strategy.passes.model.named_buffers()}
    list(steps(strategy, last=1))
    assert all(not torch.equal(before[n], b) for n, b in strategy.passes.model.named_buffers())
    assert int(strategy.passes.model[1].num_batches_tracked) == 1


def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if len(output) == 15:
        raise RuntimeError("the planted fault")
    return output.mean()


def test_a_error_in_a_replica_is_raised() -> None:
    strategy = make(Case(job=Toy(loss_of=failing), train=TOY, alone=replace(DP, loss_on="replicas")), 0)
    with pytest.raises(RuntimeError, match="the planted fault"):
        next(steps(strategy, last=1))
