"""Where a model is cut: the balanced cut against brute force, and what is said of cuts that cannot be."""

import itertools
import random

import pytest

from helpers.files.golden import Golden
from orchestrator.model.stages.cut import Cut, Layer, balance, cut_at


def layers(letters: str) -> list[Layer]:
    """A layer for each letter: ``x`` has parameters to train, ``f`` frozen ones."""
    return [
        Layer(name=f"layer{i}", num_parameters=int(letter in "xf"), trainable=letter == "x")
        for i, letter in enumerate(letters)
    ]


def every_cut(of: list[Layer], num_stages: int) -> list[Cut]:
    """Those whose stages all have parameters."""
    cuts = [Cut((0, *starts)) for starts in itertools.combinations(range(1, len(of)), num_stages - 1)]

    def has_parameters(cut: Cut, stage: int) -> bool:
        return any(of[i].num_parameters for i in cut.layers_of(stage, len(of)))

    return [cut for cut in cuts if all(has_parameters(cut, stage) for stage in range(num_stages))]


def loads(cut: Cut, costs: list[float]) -> list[float]:
    return [sum(costs[i] for i in cut.layers_of(stage, len(costs))) for stage in range(cut.num_stages)]


def squares(of_stages: list[float]) -> float:
    return sum(load * load for load in of_stages)


@pytest.mark.parametrize("seed", range(40))
def test_the_balanced_cut_is_the_best_of_all(seed: int) -> None:
    chance = random.Random(seed)
    of = layers("".join(chance.choices("xf.", weights=(3, 1, 1), k=chance.randint(2, 9))))
    costs = [float(chance.randint(0, 5)) for _ in of]
    for num_stages in range(1, len(of) + 1):
        possible = every_cut(of, num_stages)
        if sum(layer.num_parameters for layer in of) < num_stages:
            with pytest.raises(ValueError, match=rf"too few for {num_stages} stages"):
                balance(of, costs, num_stages)
            assert not possible
            continue
        found = balance(of, costs, num_stages)
        assert found in possible
        least = min(max(loads(cut, costs)) for cut in possible)
        assert max(loads(found, costs)) == least
        as_good = [loads(cut, costs) for cut in possible if max(loads(cut, costs)) == least]
        assert squares(loads(found, costs)) == min(map(squares, as_good))


def test_stages_that_are_not_the_dearest_are_even_too() -> None:
    assert balance(layers("xxxxx"), [9, 1, 1, 1, 1], 3).starts == (0, 1, 3)


@pytest.mark.parametrize("noise", [-0.01, 0, 0.01])
def test_a_difference_that_measurements_do_not_show_decides_nothing(noise: float) -> None:
    """Of the cuts [3 | 7 3 | 5 4.9] and [3 7 | 3 5 | 4.9] the second has the more even stages."""
    assert balance(layers("xxxxx"), [3 + noise, 7, 3, 5, 4.9], 3).starts == (0, 2, 4)


def test_a_difference_that_measurements_show_decides() -> None:
    assert balance(layers("xxx"), [10, 1, 10], 2).starts == (0, 1)
    assert balance(layers("xxx"), [10, 1, 9], 2).starts == (0, 1)
    assert balance(layers("xxx"), [9, 1, 10], 2).starts == (0, 2)


def test_many_layers_take_no_time() -> None:
    of = layers("x" * 300)
    assert balance(of, [1.0] * 300, 10).starts == tuple(range(0, 300, 30))


def test_a_cut_gives_each_layer_to_one_stage() -> None:
    cut = Cut((0, 2, 3))
    assert [list(cut.layers_of(stage, 6)) for stage in range(3)] == [[0, 1], [2], [3, 4, 5]]


def test_stages_begin_where_they_are_asked_to() -> None:
    assert cut_at(layers("xxxx"), ["layer1", "layer3"], 3) == (Cut((0, 1, 3)), [])


@pytest.mark.parametrize(
    ("letters", "names", "num_stages"),
    [
        *(("xxx", "layr1", 2), ("xxx", "layr1 layr2 layer1", 3), ("xxx", "layer1", 3), ("xxx", "", 2)),
        *(("xxxx", "layer2 layer1", 3), ("xxxx", "layer1 layer1", 3), ("xxxx", "layer0", 2)),
        *(("x..x", "layer1 layer3", 3), ("..x", "layer2", 2)),
    ],
)
def test_what_cannot_be_cut_is_said(letters: str, names: str, num_stages: int, golden: Golden) -> None:
    cut, errors = cut_at(layers(letters), names.split(), num_stages)
    assert cut is None
    golden.says(errors)
