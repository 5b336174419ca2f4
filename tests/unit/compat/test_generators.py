"""All random generators of a process are seeded and kept together."""

import random

import numpy as np
import torch
from torch import nn

from orchestrator.compat.generators import kept_generators
from orchestrator.model.partial_init import build_fake, build_part
from orchestrator.worker.control.rendezvous import seed_step

CPU = torch.device("cpu")


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_a_step_draws_the_same_numbers_whatever_was_drawn_before() -> None:
    with kept_generators():
        seen = []
        for _ in range(2):
            seed_step(1, 7, 0)
            seen.append(drawn())
            drawn()
        assert seen[0] == seen[1]
        for other in ((2, 7, 0), (1, 8, 0), (1, 7, 1)):
            seed_step(*other)
            assert not set(drawn()) & set(seen[0])


def test_what_a_model_draws_in_its_constructor_depends_on_the_seed_only() -> None:
    class Drawing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            with torch.no_grad():
                self.weight.copy_(torch.from_numpy(np.random.rand(2, 2)).float() + random.random())

    with kept_generators():
        first, second, other = (build_part(Drawing, lambda name: True, seed=seed) for seed in (3, 3, 4))
        assert torch.equal(first.weight, second.weight)
        assert not torch.equal(first.weight, other.weight)


def test_what_is_built_to_look_at_leaves_the_generators_as_they_were() -> None:
    with kept_generators():
        seed_step(1, 1, 0)
        expected = drawn()
        seed_step(1, 1, 0)
        build_fake(lambda: nn.Linear(int(2 + random.random()), int(np.random.random() + 2)), CPU)
        assert drawn() == expected
