"""The check of the order of communication: what it accepts, and how it describes a deadlock."""

from helpers.ranks.deadlock import Launch, Operation, find_deadlock


def reduce(*ranks: int, group: str = "default") -> Launch:
    return (Operation(name="allreduce", group=group, ranks=ranks),)


def move(sender: int, receiver: int, group: str = "default") -> Launch:
    return (Operation(name="transfer", group=group, ranks=(sender, receiver)),)


def test_ranks_that_agree_on_the_order() -> None:
    assert find_deadlock([[], []]) is None
    every, pair = reduce(0, 1, 2), reduce(0, 1)
    assert find_deadlock([[move(0, 1), every, pair], [move(0, 1), every, pair], [every]]) is None


def test_a_batch_meets_operations_one_after_the_other() -> None:
    there, back = move(0, 1), move(1, 0)
    assert find_deadlock([[there + there + back], [there, back, there]]) is None
    assert find_deadlock([[there + there + back], [there, back]]) is not None


def test_two_ranks_that_send_to_each_other_first() -> None:
    there, back = move(0, 1), move(1, 0)
    assert find_deadlock([[there, back], [back, there]]) == (
        "rank 0 waits for rank 1: send to rank 1 in group default, its launch 1\n"
        "rank 1 waits for rank 0: send to rank 0 in group default, its launch 1"
    )
    assert find_deadlock([[there, back], [there, back]]) is None
    assert find_deadlock([[there + back], [back + there]]) is None


def test_a_ring_in_which_all_send_first() -> None:
    ring = [move(rank, (rank + 1) % 4) for rank in range(4)]
    assert find_deadlock([[ring[rank], ring[rank - 1]] for rank in range(4)]) is not None
    assert find_deadlock([[ring[rank] + ring[rank - 1]] for rank in range(4)]) is None
    one_receives_first = [[ring[0], ring[3]], [ring[0], ring[1]], [ring[2], ring[1]], [ring[3], ring[2]]]
    assert find_deadlock(one_receives_first) is None


def test_two_collective_operations_in_different_order() -> None:
    a, b = reduce(0, 1, group="a"), reduce(0, 1, group="b")
    assert find_deadlock([[a, b], [a, b]]) is None
    assert find_deadlock([[a, b], [b, a]]) == (
        "rank 0 waits for rank 1: allreduce of the ranks 0, 1 in group a, its launch 1\n"
        "rank 1 waits for rank 0: allreduce of the ranks 0, 1 in group b, its launch 1"
    )


def test_different_operations_of_one_group() -> None:
    other = (Operation(name="broadcast", group="default", ranks=(0, 1)),)
    assert find_deadlock([[reduce(0, 1)], [other]]) is not None
    assert find_deadlock([[reduce(0, 1)], [reduce(0, 1, group="other")]]) is not None


def test_a_rank_that_ends_too_early() -> None:
    assert find_deadlock([[reduce(0, 1), move(0, 1)], [reduce(0, 1)]]) == (
        "rank 0 waits for rank 1: send to rank 1 in group default, its launch 2\nrank 1 has ended"
    )


def test_only_the_cycle_is_described() -> None:
    waiting = [[move(1, 0)], [move(1, 2), move(1, 0)], [move(2, 1)]]
    assert find_deadlock(waiting) == (
        "rank 1 waits for rank 2: send to rank 2 in group default, its launch 1\n"
        "rank 2 waits for rank 1: send to rank 1 in group default, its launch 1"
    )
