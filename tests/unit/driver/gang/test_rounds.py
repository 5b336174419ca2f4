"""The rounds in which the members of a gang are asked for heartbeats."""

from __future__ import annotations

import pytest

from orchestrator.driver.gang.members import HEARTBEATS_PER_ROUND, MOST_ROUNDS, in_turn


@pytest.mark.parametrize("world_size", [1, 2, 64, 65, 1024, 5000, 16_384])
def test_every_rank_is_asked_within_few_rounds(world_size: int) -> None:
    first, asked, rounds = world_size // 3, set[int](), 0
    while len(asked) < world_size:
        of_round = in_turn(first, world_size)
        assert len(of_round) == len(set(of_round))
        asked.update(of_round)
        first, rounds = (of_round[-1] + 1) % world_size, rounds + 1
    assert rounds <= min(MOST_ROUNDS, -(-world_size // HEARTBEATS_PER_ROUND))
