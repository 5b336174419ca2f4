"""Which modules ``fsdp`` gathers together."""

import torch
from torch import nn

from helpers.files.golden import Golden
from orchestrator.strategies.parts.wrapping import groups_of, order_of_calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))


def names(model: nn.Module, *wrap: str) -> list[list[str]]:
    known = {module: name for name, module in model.named_modules()}
    return [[known[module] for module in group] for group in groups_of(model, wrap or "auto")]


def test_each_repeated_block_is_a_group() -> None:
    assert names(Model()) == [["blocks.0"], ["blocks.1"], ["blocks.2"]]
    assert names(nn.Linear(2, 2)) == []


def test_classes_are_chosen_by_name_and_inner_modules_come_first() -> None:
    model = Model(1)
    model.blocks[0].scale = nn.Parameter(torch.ones(2))
    assert names(model, "Block", "Linear") == [["blocks.0.a"], ["blocks.0.b"], ["blocks.0"], ["head"]]


def test_a_name_of_no_class_is_refused_with_the_nearest(golden: Golden) -> None:
    with golden.raises(ValueError):
        names(Model(), "Blok")


def test_modules_that_share_a_parameter_are_one_group() -> None:
    model = Model()
    model.blocks[2].a.weight = model.blocks[0].b.weight
    assert names(model) == [["blocks.0", "blocks.2"], ["blocks.1"]]


def test_a_module_that_shares_a_parameter_with_the_rest_belongs_to_the_rest() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    assert len(names(model)) == 3
    model.blocks[1].a.weight = model.blocks[0].a.weight
    model.blocks[1].b.extra = model.head.weight
    assert names(model) == [["blocks.2"]]


def test_a_module_that_shares_a_parameter_with_one_around_it_belongs_to_that() -> None:
    model = Model(2)
    model.blocks[0].own = model.blocks[0].a.weight
    assert ["blocks.0.a"] not in names(model, "Block", "Linear")
    assert ["blocks.0"] in names(model, "Block", "Linear")


def test_a_module_without_parameters_of_its_own_is_no_group() -> None:
    assert names(Model(2), "Block", "Linear")[:2] == [["blocks.0.a"], ["blocks.0.b"]]
    assert ["blocks.0"] not in names(Model(2), "Block", "Linear")


def order(model: nn.Module, wrap: tuple[str, ...], seen: tuple[str, ...] = ()) -> dict[str, list[str]]:
    known = {module: name for name, module in model.named_modules()}
    calls = order_of_calls(model, groups_of(model, wrap), {"": seen}, [model])
    return {known[outer]: [known[module] for module in inner] for outer, inner in calls.items() if inner}


def test_modules_are_called_in_the_order_that_was_seen_and_others_after_the_one_before_them() -> None:
    assert order(Model(), ("Block",)) == {"": ["blocks.0", "blocks.1", "blocks.2"]}
    assert order(Model(), ("Block",), ("blocks.1",)) == {"": ["blocks.0", "blocks.1", "blocks.2"]}
    seen = ("blocks.2", "blocks.0", "blocks.2", "blocks.0")
    assert order(Model(), ("Block",), seen) == {"": [*seen, "blocks.1"]}


def test_modules_in_others_that_are_gathered_alone_have_an_order_of_their_own() -> None:
    model = Model(2)
    for block in model.blocks:
        block.scale = nn.Parameter(torch.ones(2))
    first, second = ([f"blocks.{i}.a", f"blocks.{i}.b"] for i in range(2))
    inside = {"blocks.0": first, "blocks.1": second}
    assert order(model, ("Block", "Linear")) == {"": ["head", "blocks.0", "blocks.1"], **inside}
    assert order(model, ("Linear",)) == {"": ["head", *first, *second]}
    model.blocks[1].scale = model.blocks[0].scale  # gathered together, while others run
    assert order(model, ("Block", "Linear")) == {"": ["head", "blocks.0", *first, "blocks.1", *second]}
