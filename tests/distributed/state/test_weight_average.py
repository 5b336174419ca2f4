"""``train.ema_decay``: the moving average of the weights is the same in every layout, and is evaluated too."""

from collections.abc import Iterable
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.layouts import EVERY, LAYOUTS
from helpers.conformance.reference import averages
from helpers.conformance.training import assert_same, make, model_of, piece, snapshot, steps
from helpers.jobs.quick_jobs import AdamDigits, QuickDigits, digits
from helpers.jobs.toys import TwoHeads
from helpers.ranks.gang import Gang
from helpers.ranks.loops import Ran, run_loop
from helpers.records.runs import in_campaign
from orchestrator.protocol.messages import EvalPoint
from orchestrator.state.checkpoint import load
from orchestrator.state.optimizers import AVERAGE, load_without_casts
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.update.weight_average import keep_average

DECAY, SLOW = 0.8, 0.999
AVERAGING = having(steps=6, global_batch_size=24, ema_decay=DECAY)


def averages_of(strategy: Trainer) -> dict[str, Tensor]:
    return averages(strategy.trained.snapshot(step=0, samples_consumed=0).optimizer)


def by_hand(weights: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The average of the weights after each update."""
    first, *later = weights
    average = dict(first)
    for after in later:
        average = {name: DECAY * average[name] + (1 - DECAY) * after[name] for name in average}
    return average


def on_the_fourth_call(rank: int, call: int) -> bool:
    return call >= 4


def test_a_parameter_has_an_average_from_its_first_update_on() -> None:
    """Before, an entry in its state would keep Adam from making its own."""
    strategy = make(Case(job=TwoHeads(uses=on_the_fourth_call, optimizer_of=torch.optim.Adam), train=AVERAGING), 0)
    assert isinstance(strategy, Trainer)
    seen = []
    for step, _ in enumerate(steps(strategy), 1):
        seen.append(snapshot(model_of(strategy)))
        assert ("spare.weight" in averages_of(strategy)) == (step >= 4)
    spare = [{"spare.weight": weights["spare.weight"]} for weights in seen[3:]]
    found = averages_of(strategy)["spare.weight"]
    torch.testing.assert_close(found, by_hand(spare)["spare.weight"], rtol=1e-6, atol=1e-7)


def test_a_resume_in_other_layouts_continues_it(gang: Gang) -> None:
    case = Case(job=AdamDigits(hidden=24, depth=3), train=having(AVERAGING, global_batch_size=32))
    ((_, whole),) = gang.run(piece, case, None, 6, world_size=1)
    state = None
    for name, stop in (("1F1B-2", 2), ("fsdp-2", 3), ("sharded-ddp-2", 4), ("single", 6)):
        layout = LAYOUTS[name]
        state = gang.run(piece, layout.of(case), state, stop, world_size=layout.world_size)[0][1]
    assert state is not None
    torch.testing.assert_close(averages(state.optimizer), averages(whole.optimizer), rtol=1e-2, atol=1e-3)
    assert state.meta == whole.meta


def recovered(rank: int, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rank 1 is new after the third step, and receives the state of rank 0; the averages there and at the end."""
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)
    list(steps(strategy, last=3))
    if rank == 1:
        strategy.setup(case.job.dataset("train"))
    strategy.close()
    strategy.attach()
    meta = strategy.recover_state((0, 0), source_step=3, step=3 if rank == 0 else 0, samples_consumed=3 * 24)
    assert meta["step"] == 3
    there = averages_of(strategy)
    list(steps(strategy, first=4))
    return there, averages_of(strategy)


def test_a_new_worker_receives_it_from_a_survivor(gang: Gang) -> None:
    case = Case(job=AdamDigits(hidden=24), train=AVERAGING)
    (_, undisturbed), _ = gang.run(piece, case, None, 6, world_size=2)
    (there, end), (received, received_end) = gang.run(recovered, case, world_size=2)
    assert there
    assert_same(received, there)
    assert_same(received_end, end)
    assert_same(end, averages(undisturbed.optimizer))


class Sampled(QuickDigits):
    """Its sample is the loss of the model that it is drawn from, on the validation set."""

    def sample(self, model: nn.Module, generator: torch.Generator) -> str:
        items = self.dataset("val").items
        inputs, targets = (torch.stack([torch.as_tensor(item[i]) for item in items]) for i in (0, 1))
        return repr(float(self.loss(model(inputs), targets)))


class Half(AdamDigits):
    """A model that the job builds in 16 bits."""

    def model(self) -> nn.Module:
        return super().model().to(torch.bfloat16)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(inputs.bfloat16()).float()


def worst_difference(rank: int, case: Case) -> float:
    """The largest difference of this rank's averages, of a resumed run, from those that are computed in float32."""
    strategy = make(case, rank)
    assert isinstance(strategy, Trainer)
    expected: dict[Tensor, Tensor] = {}
    for step, _ in enumerate(steps(strategy), 1):
        if step == 3:
            strategy.load(strategy.trained.snapshot(step=step, samples_consumed=0))
        for p in strategy.trained.parameters:
            now = p.detach().float()
            expected[p] = SLOW * expected[p] + (1 - SLOW) * now if p in expected else now.clone()
    state = strategy.trained.optimizer.state
    assert {state[p][AVERAGE].dtype for p in expected} == {torch.float32}
    assert all(p.dtype == torch.bfloat16 for p in expected)
    assert any(not torch.equal(p.float(), average) for p, average in expected.items())
    return max(float((state[p][AVERAGE] - average).abs().max()) for p, average in expected.items())


@pytest.mark.parametrize("name", ["sharded-ddp-2", "fsdp-2", *in_campaign("single", "hsdp-2x2", "1F1B-2", "dp-2")])
def test_it_is_kept_in_float32_for_weights_of_16_bits(gang: Gang, name: str) -> None:
    """In 16 bits, an average of a slow decay never moves."""
    train = having(AVERAGING, global_batch_size=32, ema_decay=SLOW)
    by_job = Case(job=Half(hidden=24, depth=3), train=train)
    by_precision = Case(job=AdamDigits(hidden=24, depth=3), train=having(train, precision="bf16-true"))
    for case in (by_job, by_precision):
        found = gang.run(worst_difference, EVERY[name].of(case), world_size=EVERY[name].world_size)
        assert max(found) < 1e-7


def test_an_average_of_16_bits_in_an_old_checkpoint_goes_on_in_float32() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    keep_average(optimizer, SLOW)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    old = optimizer.state_dict()
    old["state"][0][AVERAGE] = torch.full((3,), 2.0, dtype=torch.bfloat16)
    load_without_casts(optimizer, old, {"weight": weight}, {"weight": torch.bfloat16})
    optimizer.step()
    assert optimizer.state[weight][AVERAGE].tolist() == pytest.approx([SLOW * 2 + (1 - SLOW)] * 3, rel=1e-6)


def test_it_keeps_its_digits_where_weights_become_those_of_16_bits() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    said = optimizer.state_dict() | {"state": {0: {AVERAGE: torch.full((3,), 1.001)}}}
    load_without_casts(optimizer, said, {"weight": weight}, {"weight": torch.float32})
    assert optimizer.state[weight][AVERAGE].tolist() == pytest.approx([1.001] * 3)


def last_evaluation(ran: Ran) -> EvalPoint:
    return next(p for p in reversed(ran.points) if isinstance(p, EvalPoint))


@pytest.mark.parametrize("name", ["fsdp-2", "1F1B-2", *in_campaign("single", "sharded-ddp-2")])
def test_it_is_evaluated_and_sampled_with_the_weights_swapped_in_and_back(
    gang: Gang, tmp_path: Path, name: str
) -> None:
    layout, job = LAYOUTS[name], Sampled(hidden=24, depth=3, val_size=32, lr=0.3)
    train = having(AVERAGING, global_batch_size=32, eval_every=3)
    with_it, without = (
        gang.run(run_loop, case, tmp_path / str(case.train.ema_decay), world_size=layout.world_size)
        for case in (layout.of(Case(job=job, train=having(train, ema_decay=decay))) for decay in (DECAY, None))
    )
    state, plain = (load(tmp_path / str(decay) / "checkpoints" / "step-00000006") for decay in (DECAY, None))
    assert_same(state.model, plain.model)
    for ran, ran_without in zip(with_it, without, strict=True):
        assert [p.loss_sum for p in ran.points] == [p.loss_sum for p in ran_without.points]
        assert all(p.ema is None for p in ran_without.points if isinstance(p, EvalPoint))

    model = job.model()
    model.load_state_dict({**state.model, **averages(state.optimizer)})
    with torch.no_grad():
        expected = float(job.sample(model, torch.Generator()))
    assert float(with_it[0].outcome.texts["sample"]) == pytest.approx(expected, rel=1e-5)
    own = fsum(last_evaluation(ran).loss_sum for ran in without) / 32
    assert float(without[0].outcome.texts["sample"]) == pytest.approx(own, rel=1e-5)
    points = [last_evaluation(ran) for ran in with_it]
    found = [p.ema for p in points if p.ema is not None]
    assert len(found) == len(points)
    assert fsum(p.weight for p in found) == 32
    assert fsum(p.loss_sum for p in found) / 32 == pytest.approx(expected, rel=1e-5)
    assert any(p.sums != own.sums or p.loss_sum != own.loss_sum for p, own in zip(found, points, strict=True))
    assert sum(p.sums.get("accuracy", 0.0) for p in found) > 0


def test_it_can_be_switched_off_and_on_again(gang: Gang, tmp_path: Path) -> None:
    train = having(AVERAGING, steps=4)
    on = Case(job=AdamDigits(hidden=24, val_size=8), train=train)
    off = replace(on, train=having(train, steps=6, ema_decay=None))
    again = replace(on, train=having(train, steps=8))
    checkpoint = None
    for case, world_size, name in ((on, 2, "on"), (off, 1, "off"), (again, 2, "again")):
        folder = tmp_path / name
        ranks = gang.run(run_loop, case, folder, checkpoint, world_size=world_size)
        checkpoint = str(folder / "checkpoints" / f"step-{case.train.steps:08d}")
        kept = averages(load(Path(checkpoint)).optimizer)
        assert bool(kept) == (name != "off")
        assert (last_evaluation(ranks[0]).ema is None) == (name == "off")
    strategy = make(again, 0)
    assert isinstance(strategy, Trainer)
    strategy.restore(load(tmp_path / "off" / "checkpoints" / "step-00000006"), source=0)
    seen = [snapshot(model_of(strategy)) for _ in steps(strategy, first=7)]
    torch.testing.assert_close(kept, by_hand(seen), rtol=1e-4, atol=1e-5)


def interrupted(rank: int, case: Case) -> bool:
    """Fail in the evaluation of the average; whether the weights were others there."""
    strategy = make(case, rank)
    list(steps(strategy))
    before, changed = snapshot(model_of(strategy)), False
    try:
        with strategy.weights_to_evaluate(averaged=True):
            changed = not torch.equal(model_of(strategy).state_dict()["head.weight"], before["head.weight"])
            raise RuntimeError("the planted fault")
    except RuntimeError:
        assert_same(snapshot(model_of(strategy)), before)
    return changed


def test_an_error_in_its_evaluation_leaves_the_weights(gang: Gang) -> None:
    assert gang.run(interrupted, Case(job=digits(), train=AVERAGING, options=DDP), world_size=2) == [True, True]
