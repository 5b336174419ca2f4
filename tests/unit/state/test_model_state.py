"""Models whose ``state_dict()`` is not just their parameters and buffers: what is saved of them, and loaded again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from helpers.files.golden import Golden
from orchestrator.planning.placement import Box, Ranges
from orchestrator.state.checkpoint import load, save
from orchestrator.state.model_state import LEFT_OUT, check_built, checksum, dropped_names, saving_errors, total
from orchestrator.state.train_state import TrainState, capture, restore


class Plain(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Dropping(Plain):
    """Leaves out a frozen part, as adapters on a large model do."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.body.requires_grad_(False)
        self.register_state_dict_post_hook(lambda module, said, prefix, meta: drop(said, "body"))


def drop(said: dict[str, Any], beginning: str) -> None:
    for name in [name for name in said if name.startswith(beginning)]:
        del said[name]


class DroppingTrained(Plain):
    """Leaves out what is trained, and takes no notice of it when it loads."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.register_state_dict_post_hook(lambda module, said, prefix, meta: drop(said, "head"))
        self.register_load_state_dict_pre_hook(lambda module, said, *rest: drop(said, "head"))


class Renaming(Plain):
    """Has another name for its body in files, in one direction only."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.register_state_dict_post_hook(rename)


def rename(module: nn.Module, said: dict[str, Any], prefix: str, meta: Any) -> None:
    for name in [name for name in said if name.startswith("body")]:
        said[f"encoder{name.removeprefix('body')}"] = said.pop(name)


class Halving(Plain):
    """Writes its head in half precision."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.register_state_dict_post_hook(
            lambda module, said, prefix, meta: said.update({"head.weight": said["head.weight"].half()})
        )


class Counting(Plain):
    """Numbers that are no buffers, in the children and in the model itself; tells when it has loaded."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.calls, self.history, self.loads = seed, [float(seed)], 0
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(self, "loads", self.loads + 1))

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "history": (self.history, torch.tensor(self.history).double())}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.history = state["calls"], state["history"][0]
        assert state["history"][1].dtype == torch.float64


class CountingInTensors(Counting):
    """As a tensor whose shape changes."""

    def get_extra_state(self) -> Tensor:  # type: ignore[override]
        return torch.tensor(self.history)

    def set_extra_state(self, state: Tensor) -> None:  # type: ignore[override]
        self.history = state.tolist()


class Adding(Plain):
    """Adds an entry by a hook, and takes it back by another."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.scale = torch.tensor(float(seed))
        self.register_state_dict_post_hook(lambda module, said, prefix, meta: said.update({"scale": self.scale}))
        self.register_load_state_dict_pre_hook(lambda module, said, *rest: setattr(self, "scale", said.pop("scale")))


KINDS = [Plain, Dropping, DroppingTrained, Renaming, Halving, Counting, CountingInTensors, Adding]


def saved(model: nn.Module, tmp_path: Path, **more: Any) -> TrainState:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return load(save(tmp_path, capture(model, optimizer, None, step=1, samples_consumed=1, **more), run_uid="r"))


def restored(state: TrainState, model: nn.Module) -> None:
    restore(state, model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_restored_whatever_its_state_dict_does(kind: type[Plain], tmp_path: Path) -> None:
    model, other = kind(3), kind(1)
    if isinstance(model, Counting):
        model.history.append(0.5)
    restored(saved(model, tmp_path), other)
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    assert [torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True)] == [True] * 4
    if isinstance(model, Counting) and isinstance(other, Counting):
        assert other.history == [3.0, 0.5]
        assert other.calls == (1 if isinstance(model, CountingInTensors) else 3)
        assert other.loads == 1
    if isinstance(other, Adding):
        assert other.scale == 3


def test_names_in_the_file_are_those_of_the_model(tmp_path: Path) -> None:
    assert saved(Renaming(0), tmp_path).model.keys() == saved(Plain(0), tmp_path).model.keys()


def test_frozen_parameters_that_it_drops_are_left_out(tmp_path: Path) -> None:
    model = Dropping(0)
    assert dropped_names(model) == {"body.weight", "body.bias"}
    state = saved(model, tmp_path, left_out={name: 0 for name in dropped_names(model)})
    assert "body.weight" not in state.model
    assert [*state.meta[LEFT_OUT]] == [*dropped_names(model)]
    other = Dropping(0)
    restored(state, other)
    assert torch.equal(other.head.weight, model.head.weight)
    assert dropped_names(Renaming(0)) == dropped_names(Plain(0)) == frozenset()


class Objects(Plain):
    def get_extra_state(self) -> Any:
        return {"when": object()}


class Spread(Plain):
    def __init__(self, seed: int):
        super().__init__(seed)
        self.gain = nn.Parameter(torch.ones(1).expand(4))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_parts_take_only_models_that_say_what_they_are(kind: type[Plain]) -> None:
    with torch.device("meta"):
        model = kind(0)
    assert saving_errors(model, in_parts=False) == []
    errors = saving_errors(model, in_parts=True)
    assert len(errors) == (kind is not Plain)
    assert all("use strategy=ddp" in error for error in errors)


def test_what_cannot_be_saved_is_told_without_memory(golden: Golden) -> None:
    with torch.device("meta"):
        (error,) = saving_errors(Objects(0), in_parts=False)
        (of_memory,) = saving_errors(Spread(0), in_parts=False)
    golden.says(error)
    golden.says(of_memory)


def test_the_state_is_json(tmp_path: Path) -> None:
    model = Counting(2)
    state = capture(model, SGD(model.parameters(), lr=0.1), None, step=1, samples_consumed=1)
    assert json.loads(json.dumps(state.meta)) == state.meta


@pytest.mark.parametrize("shape", [(7, 3, 2), (5,), ()])
def test_the_parts_of_a_tensor_give_the_checksum_of_the_whole(shape: tuple[int, ...], golden: Golden) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = checksum(whole, Box.whole(shape))
    assert expected == checksum(whole.double(), Box.whole(shape)), "whatever the dtype"
    if shape:
        boxes = [Box.shard(shape, index, 3) for index in range(3)]
        parts = [{"a": checksum(whole[box.slices_in(Box.whole(shape))], box)} for box in boxes]
        assert total(parts) == {"a": expected}
        assert checksum(whole.flip(0), Box.whole(shape)) != expected
    other = whole.clone()
    other.view(-1)[-1] += 1e-3
    with golden.raises(ValueError):
        check_built({"a": expected}, {"a": checksum(other, Box.whole(shape))})


@pytest.mark.parametrize("places", [[((0, 2),), ((2, 2),)], [((0, 1), (2, 1)), ((1, 1), (3, 1))]], ids=str)
def test_columns_give_the_checksum_of_the_whole(places: list[Ranges]) -> None:
    whole = torch.arange(12).view(3, 4)
    boxes = [Box.cut((3, 4), axis=1, places=columns) for columns in places]
    parts = [{"a": checksum(whole[box.slices_in(Box.whole((3, 4)))], box)} for box in boxes]
    assert total(parts)["a"] == checksum(whole, Box.whole((3, 4)))
