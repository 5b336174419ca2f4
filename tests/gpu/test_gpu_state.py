"""Training state on a GPU: checkpoints of any layout and device, transfers, the average of the weights."""

import pytest
import torch
from torch import nn

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import ADAMW, LAYOUTS
from helpers.conformance.training import losses, piece
from helpers.jobs.quick_jobs import AdamDigits
from helpers.jobs.stage_toys import ScheduledChain, plain
from helpers.ranks.gang import GLOO, Gang, gang_on, own_device
from helpers.ranks.passed_state import assert_arrives_as_sent, assert_live_tensors_are_sent, broadcast_from_1
from orchestrator.state.optimizers import AVERAGE
from orchestrator.state.train_state import capture

STOP, STEPS = 3, 6
CASE = Case(job=ScheduledChain(build=plain), train=having(steps=STEPS, global_batch_size=32))
RTOL = 10 * ADAMW
SUCCESSORS = {
    "single": "GPipe-2x2",
    "GPipe-2x2": "ddp-2",
    "ddp-2": "1F1B-4",
    "1F1B-4": "InterleavedZeroBubble-2",
    "InterleavedZeroBubble-2": "ddp-4",
    "ddp-4": "single",
}
"""By layout, the one that continues its checkpoint."""


def assert_continued(saved_on: Gang, saved_by: str, continued_on: Gang, continued_by: str) -> None:
    ((alone, end),) = continued_on.run(piece, CASE, None, STEPS, world_size=1)
    first, second = LAYOUTS[saved_by], LAYOUTS[continued_by]
    begun = saved_on.run(piece, first.of(CASE), None, STOP, world_size=first.world_size)
    continued = continued_on.run(piece, second.of(CASE), begun[0][1], STEPS, world_size=second.world_size)
    curve = torch.cat([losses([seen for seen, _ in ranks]) for ranks in (begun, continued)])
    torch.testing.assert_close(curve, losses([alone]), rtol=RTOL, atol=0)
    state = continued[0][1]
    torch.testing.assert_close(state.model, end.model, rtol=100 * RTOL, atol=10 * RTOL)
    assert state.meta == end.meta


@pytest.mark.parametrize("saved_by", SUCCESSORS)
def test_a_checkpoint_is_continued_by_another_layout(gang: Gang, saved_by: str) -> None:
    """If it fails, a checkpoint of a GPU cannot be read by another layout."""
    assert_continued(gang, saved_by, gang, SUCCESSORS[saved_by])


def test_a_checkpoint_moves_between_cpus_and_gpus(gang: Gang) -> None:
    """If it fails, a checkpoint depends on the device that wrote it."""
    assert_continued(gang_on(GLOO), "ddp-2", gang, "1F1B-2")
    assert_continued(gang, "1F1B-2", gang_on(GLOO), "ddp-2")


@pytest.mark.parametrize("reuse", [False, True])
def test_a_state_arrives_as_it_was_sent(gang: Gang, reuse: bool) -> None:
    """If it fails, the transfer of a state through device memory changes values."""
    assert_arrives_as_sent(gang, reuse=reuse)


@pytest.mark.parametrize(
    ("name", "sources"), [("ddp-4", (0, 1, 2, 0)), ("GPipe-2x2", (0, 1, 0, 1)), ("hsdp-2x2", (0, 1, 0, 1))]
)
@pytest.mark.parametrize("own_step", [0, 1], ids=["new workers", "survivors that are behind"])
def test_a_recovery_sends_live_tensors_to_the_ranks_that_need_them(
    gang: Gang, name: str, sources: tuple[int, ...], own_step: int
) -> None:
    """If it fails, the time of a recovery grows with the state, or a new worker gets another one."""
    assert_live_tensors_are_sent(gang, name, sources, own_step=own_step)


def test_tensors_of_any_type_take_the_values_of_one_rank(gang: Gang) -> None:
    """If it fails, a type of tensor cannot be broadcast by NCCL."""
    received, sent = gang.run(broadcast_from_1, world_size=2)
    assert all(torch.equal(got, value) for got, value in zip(received, sent, strict=True))


@pytest.mark.parametrize("name", ["ddp-2", "1F1B-2", "GPipe-2x2"])
def test_the_average_of_the_weights_is_that_of_one_worker(gang: Gang, name: str) -> None:
    """If it fails, the moving average differs between layouts."""
    case = Case(job=AdamDigits(hidden=24, depth=3), train=having(steps=STEPS, global_batch_size=32, ema_decay=0.8))
    ((_, alone),) = gang.run(piece, case, None, STEPS, world_size=1)
    layout = LAYOUTS[name]
    state = gang.run(piece, layout.of(case), None, STEPS, world_size=layout.world_size)[0][1]
    expected, found = (
        {path: t for path, t in of.optimizer.items() if path.endswith(f"/{AVERAGE}")} for of in (alone, state)
    )
    assert len(expected) == len(dict(case.job.model().named_parameters()))
    torch.testing.assert_close(found, expected, rtol=100 * RTOL, atol=10 * RTOL)


def snapshots_of_a_busy_device(rank: int) -> tuple[list[set[float]], str | None]:
    """The values in two snapshots, the second in the memory of the first, and the parameter that is not finite then."""
    device = own_device()
    model, matrix = nn.Linear(1024, 1024).to(device), torch.randn(2048, 2048, device=device)
    optimizer, state, seen = torch.optim.SGD(model.parameters()), None, []
    for value in (1.0, float("inf")):
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)
        with torch.no_grad():
            model.weight.fill_(value)  # behind long work
            state = capture(model, optimizer, None, step=1, samples_consumed=1, into=state)
            model.weight.fill_(0.0)
        seen.append(set(state.model["weight"].unique().tolist()))
    return seen, state.nonfinite_parameter


def memory_of_snapshots(rank: int) -> tuple[list[set[int]], bool]:
    """The blocks of memory that hold the tensors of each of two snapshots, and whether they are pinned."""
    model = nn.Linear(64, 64).to(own_device())
    optimizer, state, blocks, pinned = torch.optim.Adam(model.parameters()), None, [], True
    for _ in range(2):
        model(torch.ones(1, 64, device=own_device())).sum().backward()
        optimizer.step()
        state = capture(model, optimizer, None, step=1, samples_consumed=1, into=state)
        on_device = [t for name, t in (*state.model.items(), *state.optimizer.items()) if not name.endswith("/step")]
        blocks.append({tensor.untyped_storage().data_ptr() for tensor in on_device})
        pinned = pinned and all(tensor.is_pinned() for tensor in on_device)
    return blocks, pinned


@pytest.mark.usefixtures("gpu")
def test_all_snapshots_are_copied_into_one_block_of_pinned_memory(gang: Gang) -> None:
    """If it fails, each checkpoint pins memory anew, for which training waits."""
    ((blocks, pinned),) = gang.run(memory_of_snapshots, world_size=1)
    assert pinned
    assert len(blocks[0]) == 1
    assert blocks[1] == blocks[0]


def test_a_snapshot_has_what_the_device_had_when_it_was_taken(gang: Gang) -> None:
    """If it fails, a checkpoint contains values of a later step, because its copy did not wait."""
    ((seen, nonfinite),) = gang.run(snapshots_of_a_busy_device, world_size=1)
    assert seen == [{1.0}, {float("inf")}]
    assert nonfinite == "weight"
