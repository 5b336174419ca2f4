"""A checkpoint of any layout is continued by any other, and its files are the same whatever wrote them."""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers.conformance.cases import Case, config_of, having, plan_of
from helpers.conformance.layouts import ADAMW, EVERY, FSDP, LAYOUTS, SGD, in_turn, taking_turns
from helpers.conformance.layouts import layout as layout_of
from helpers.conformance.training import Steps, losses, piece, restored, saved_piece, train
from helpers.jobs.matrix_optimizers import OfTall, Preconditioned
from helpers.jobs.quick_jobs import digits
from helpers.jobs.stage_toys import ScheduledChain, plain
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.state.checkpoint import load, path_of
from orchestrator.state.manifest import KINDS, MANIFEST, file_name
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.keys import MeshConfig

STOP, STEPS = 3, 6
FSDP_4 = layout_of(FSDP, 4)
OTHERS = {"adamw-scheduled": (11,), "sgd-momentum": (3, 8, 14)}
"""Every layout continues so many of the others, and is continued by as many: those so many places after it."""

CASES = {
    "adamw-scheduled": (Case(job=ScheduledChain(build=plain), train=having(steps=STEPS, global_batch_size=32)), ADAMW),
    "sgd-momentum": (Case(job=digits(depth=3), train=having(steps=STEPS, global_batch_size=32)), SGD),
}


def divides_tensors(name: str) -> bool:
    layout = EVERY[name]
    return isinstance(layout.options, MeshConfig) and (layout.options.opens("wrap") or layout.options.shard_optimizer)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def begun(gang: Gang, case: Case, name: str, root: Path) -> tuple[list[Steps], TrainState]:
    """What the ranks of a layout saw up to ``STOP``, and what rank 0 would save alone; they save in ``root``."""
    layout = EVERY[name]
    results = gang.run(saved_piece, layout.of(case), STOP, root / name, world_size=layout.world_size)
    assert [kept is not None for _, kept in results] == [rank == 0 for rank in range(layout.world_size)]
    return [seen for seen, _ in results], results[0][1]


@cache
def uninterrupted(gang: Gang, case: Case) -> tuple[Steps, TrainState]:
    ((seen, state),) = gang.run(piece, case, None, STEPS, world_size=1)
    return seen, state


@pytest.mark.parametrize("continued_by", taking_turns(LAYOUTS))
@pytest.mark.parametrize("name", ["adamw-scheduled", *in_campaign("sgd-momentum")])
def test_any_layout_continues_others(gang: Gang, name: str, continued_by: str, root: Path) -> None:
    case, rtol = CASES[name]
    alone, end = uninterrupted(gang, case)
    layout, names = LAYOUTS[continued_by], list(LAYOUTS)
    for places in OTHERS[name]:
        saved_by = names[(names.index(continued_by) + places) % len(names)]
        before, state = begun(gang, case, saved_by, root / name)
        results = gang.run(piece, layout.of(case), state, STEPS, world_size=layout.world_size)
        curve = torch.cat([losses(before), losses([seen for seen, _ in results])])
        pair = f"saved by {saved_by}, continued by {continued_by}: "
        torch.testing.assert_close(curve, losses([alone]), rtol=rtol, atol=0, msg=lambda m, pair=pair: pair + m)
        continued = results[0][1]
        torch.testing.assert_close(continued.model, end.model, rtol=100 * rtol, atol=10 * rtol)
        torch.testing.assert_close(continued.optimizer, end.optimizer, rtol=1000 * rtol, atol=10 * rtol)
        assert continued.meta == end.meta


@pytest.mark.parametrize("loaded_by", taking_turns(EVERY, 1))
def test_every_layout_loads_what_any_has_saved_bit_for_bit(gang: Gang, loaded_by: str, root: Path) -> None:
    case, _ = CASES["adamw-scheduled"]
    folder = root / "adamw-scheduled"
    names = in_turn(EVERY, 2)
    for name in names:
        begun(gang, case, name, folder)
    saved = {name: path_of(folder / name, STOP) for name in names}
    layout = EVERY[loaded_by]
    by_first, *by_others = gang.run(restored, layout.of(case), saved, world_size=layout.world_size)
    assert by_first == {name: [] for name in names}
    assert not any(by_others)


WHOLE_TENSORS = Case(job=OfTall(kind=Preconditioned), train=having(steps=STEPS, global_batch_size=32, ema_decay=0.8))


@pytest.mark.parametrize(
    ("saved_by", "continued_by"),
    [
        ("fsdp-2", "single"),
        ("single", "sharded-ddp-3"),
        *in_campaign(("fsdp-2", "fsdp-4"), ("fsdp-2", "mesh-zero1-in-stages-2x2")),
    ],
)
def test_state_for_updates_of_whole_tensors_is_read_by_all(
    gang: Gang, saved_by: str, continued_by: str, root: Path
) -> None:
    """Some of it is divided as its parameter, and some is not, although it has the shape of a part."""
    folder = root / "whole-tensors"
    alone, end = uninterrupted(gang, WHOLE_TENSORS)
    before, state = begun(gang, WHOLE_TENSORS, saved_by, folder)
    assert any(path.endswith("/GG.1") for path in state.optimizer)
    layout = {**LAYOUTS, "fsdp-4": FSDP_4}[continued_by]
    results = gang.run(piece, layout.of(WHOLE_TENSORS), state, STEPS, world_size=layout.world_size)
    curve = torch.cat([losses(before), losses([seen for seen, _ in results])])
    torch.testing.assert_close(curve, losses([alone]), rtol=ADAMW, atol=0)
    continued = results[0][1]
    torch.testing.assert_close(continued.model, end.model, rtol=100 * ADAMW, atol=10 * ADAMW)
    assert {path: t.shape for path, t in continued.optimizer.items()} == {p: t.shape for p, t in end.optimizer.items()}
    assert continued.meta == end.meta
    saved = {saved_by: path_of(folder / saved_by, STOP)}
    assert gang.run(restored, layout.of(WHOLE_TENSORS), saved, world_size=layout.world_size)[0] == {saved_by: []}


@pytest.mark.parametrize("saved_by", taking_turns((name for name in LAYOUTS if not divides_tensors(name)), 3))
def test_the_files_have_the_same_tensors_whatever_wrote_them(gang: Gang, root: Path, saved_by: str) -> None:
    case, _ = CASES["adamw-scheduled"]
    folder = root / "adamw-scheduled"
    _, of_single = begun(gang, case, "single", folder)
    _, state = begun(gang, case, saved_by, folder)
    path, layout = path_of(folder / saved_by, STOP), LAYOUTS[saved_by]
    writers = plan_of(config_of(layout.of(case), layout.world_size)).mesh.pipeline
    files = [file_name(kind, part, writers) for kind in KINDS for part in range(writers)]
    assert sorted(p.name for p in path.iterdir()) == sorted([MANIFEST, *files])
    assert load(path).meta == of_single.meta
    found = {}
    for kind in KINDS:
        found[kind] = {n: t for file in path.glob(f"{kind}*") for n, t in load_file(file).items()}
        assert {n: (t.shape, t.dtype) for n, t in found[kind].items()} == {
            n: (t.shape, t.dtype) for n, t in getattr(of_single, kind).items()
        }
        assert all(torch.equal(tensor, getattr(state, kind)[name]) for name, tensor in found[kind].items())
    model = case.job.model()
    model.load_state_dict(found["model"])
    torch.testing.assert_close(dict(model.state_dict()), of_single.model, rtol=100 * ADAMW, atol=10 * ADAMW)


class Named(nn.Module):
    """Holds a table under a name that nobody uses, as T5 does, and a layer and a buffer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(10, 10)
        self.spare = nn.Linear(3, 3)
        self.register_buffer("unread", torch.arange(3.0))
        self.first, self.second, self.head = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 4)
        self.first.weight = self.second.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


class HandCut(ScheduledChain):
    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Named)
        return [nn.Sequential(model.first, nn.Tanh()), nn.Sequential(model.second, nn.Tanh(), model.head)]


@pytest.mark.parametrize("saved_by", ["GPipe-2", *in_campaign("1F1B-2x2")])
def test_tensors_that_no_stage_uses_are_saved_too(gang: Gang, saved_by: str, root: Path) -> None:
    case = Case(job=ScheduledChain(build=Named), train=having(steps=STEPS, global_batch_size=32))
    alone, end = uninterrupted(gang, case)
    _, of_single = begun(gang, case, "single", root / "named")
    before, state = begun(gang, case, saved_by, root / "named")
    assert state.model.keys() == of_single.model.keys()
    assert state.meta == of_single.meta
    assert torch.equal(state.model["spare.weight"], of_single.model["spare.weight"])
    ((after, continued),) = gang.run(piece, case, state, STEPS, world_size=1)
    curve = torch.cat([losses(before), losses([after])])
    torch.testing.assert_close(curve, losses([alone]), rtol=ADAMW, atol=0)
    torch.testing.assert_close(continued.model, end.model, rtol=100 * ADAMW, atol=10 * ADAMW)
    layout = LAYOUTS[saved_by]
    ranks = gang.run(piece, layout.of(case), of_single, STEPS, world_size=layout.world_size)
    torch.testing.assert_close(ranks[0][1].model, end.model, rtol=100 * ADAMW, atol=10 * ADAMW)


def test_a_cut_by_hand_without_a_tensor_of_the_model_is_refused(gang: Gang) -> None:
    case = Case(job=HandCut(build=Named), train=having(steps=STEPS, global_batch_size=32))
    answers = gang.ask(train, LAYOUTS["GPipe-2"].of(case), world_size=2)
    assert "Job.stages: none of its modules holds unread; add the module that does to the list" in str(answers[0].error)
