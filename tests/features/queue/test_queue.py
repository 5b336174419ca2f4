"""Who reserves next, who makes room, and what the queue keeps, without Ray."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from helpers.files.golden import Golden
from helpers.machines.queue_entries import entry
from orchestrator.features.queue.entries import NodeResources, QueueEntry
from orchestrator.features.queue.queue_order import (
    find_entries,
    line,
    marked_over_share,
    marked_unfit,
    may_reserve,
    unreserved_by_node,
    victims,
    why_waiting,
)
from orchestrator.features.queue.run_queue import SETTLE_S, STALE_S, RunQueue
from orchestrator.features.queue.shown import order_notes, queue_table
from orchestrator.policy.shortage import ClusterState, NodeState
from orchestrator.queue import main

FOUR_CPUS = {"a": NodeResources(cpus=4, gpus=0, free_cpus=4, free_gpus=0)}


def names(entries: list[QueueEntry]) -> list[str]:
    return [e.name for e in entries]


def admitted(entries: list[QueueEntry], nodes: Mapping[str, NodeResources] = FOUR_CPUS) -> list[str]:
    free = unreserved_by_node(nodes, entries)
    return [e.name for e in line(entries) if may_reserve(e, entries, free)]


def leaving(entries: list[QueueEntry], nodes: Mapping[str, NodeResources] = FOUR_CPUS) -> list[str]:
    return names(victims(entries, unreserved_by_node(nodes, entries)))


def test_the_line_is_in_order_of_priority_and_then_of_submission() -> None:
    runs = [
        entry("late", at=3),
        entry("early", at=1),
        entry("urgent", at=9, priority=5),
        entry("runs", state="running"),
    ]
    assert names(line(runs)) == ["urgent", "early", "late"]
    assert names(line([replace(r, submitted_at=0) for r in runs[:2]])) == ["early", "late"], "always the same order"


def test_runs_reserve_in_turn_and_beside_each_other_if_all_of_them_fit() -> None:
    first, second = entry("first", at=1, workers=2), entry("second", at=2, workers=2)
    assert admitted([second, first]) == ["first"], "the others at their next poll"
    reserving = replace(first, state="reserving")
    assert admitted([second, reserving]) == ["first", "second"]
    assert admitted([replace(second, workers=3), reserving]) == ["first"]
    assert admitted([second, replace(reserving, most_workers=3)]) == ["first"], "it may take more than it needs"
    assert admitted([second, replace(reserving, workers_by_node={"a": 2})]) == ["first", "second"]
    assert admitted([entry("third", at=3), second, replace(reserving, workers=1)]) == ["first", "second"]
    assert admitted([second, replace(first, state="running", workers_by_node={"a": 2})]) == ["second"]


@pytest.mark.parametrize(
    ("reserving", "waiting", "fits"),
    [
        ({"workers": 2}, {"workers": 6}, True),
        ({"workers": 2}, {"workers": 7}, False),
        ({"workers": 2}, {"workers": 4, "one_node": True}, False),  # Ray may put one on each node
        ({"workers": 2, "one_node": True}, {"workers": 4, "one_node": True}, True),
        ({"workers": 4, "one_node": True}, {"workers": 1}, True),
        ({"workers": 4, "one_node": True}, {"workers": 2}, False),  # it may break up both nodes
        ({"workers": 1}, {"workers": 3, "one_node": True}, True),
        ({"workers": 2, "cpus_per_worker": 2}, {"workers": 4}, False),  # 3 and 1 leave room for one of the first
        ({"workers": 2, "cpus_per_worker": 0.5}, {"workers": 3, "cpus_per_worker": 2}, False),
        ({"workers": 8}, {"gpus_per_worker": 1.0, "cpus_per_worker": 0}, True),
    ],
)
def test_runs_reserve_beside_each_other_only_if_they_fit_wherever_ray_places_them(
    reserving: dict[str, Any], waiting: dict[str, Any], fits: bool
) -> None:
    node = NodeResources(cpus=4, gpus=1, free_cpus=4, free_gpus=1)
    runs = [entry("first", at=1, state="reserving", **reserving), entry("second", at=2, **waiting)]
    assert admitted(runs, {"a": node, "b": node}) == ["first", *(["second"] if fits else [])]


def test_many_short_waits_are_one() -> None:
    """All runs that fit are admitted by polls in a row, before any of them has its workers."""
    queue = RunQueue(settle_s=0.0, nodes=lambda: FOUR_CPUS)
    runs = [entry(f"run {number}", at=number) for number in range(6)]
    answers = [queue.poll(run) for run in runs]
    assert [answer.may_reserve for answer in answers] == [True] * 4 + [False] * 2
    assert [answer.overtakes for answer in answers] == [()] * 6


def test_a_run_that_reserves_loses_its_turn_to_a_more_urgent_one_which_waits_for_that() -> None:
    reserving, urgent = entry("reserving", workers=4, state="reserving"), entry("urgent", at=2, priority=1)
    assert admitted([reserving, urgent]) == []
    assert admitted([replace(reserving, state="waiting"), urgent]) == ["urgent"]
    assert admitted([replace(reserving, workers=3), urgent]) == ["urgent", "reserving"], "there is room for both"


def test_a_run_waits_until_its_workers_fit() -> None:
    running, waiting = entry("running", workers=3, state="running"), entry("waiting", at=1, workers=2)
    assert admitted([running, waiting]) == []
    assert admitted([running, replace(waiting, workers=1)]) == ["waiting"]


def test_a_run_overtakes_one_that_must_wait_in_any_case() -> None:
    running, first = entry("running", workers=3, state="running"), entry("first", at=1, workers=4)
    small, smaller = entry("small", at=2), entry("smaller", at=3, cpus_per_worker=0.5)
    assert admitted([running, first, small, smaller]) == ["small", "smaller"]
    reserving = replace(small, state="reserving", overtook=("first",))
    assert admitted([running, first, reserving, smaller]) == ["small"], "one at a time"
    assert admitted([running, first, replace(small, workers=2)]) == [], "it does not fit"
    assert admitted([first, small]) == ["first"]
    assert admitted([running, replace(first, workers=1), small]) == ["first"]
    assert admitted([running, replace(first, autoscaling=True), small]) == ["first"]
    assert admitted([running, replace(first, state="reserving"), small]) == ["first"]
    assert admitted([replace(running, state="yielding"), first, small]) == [], "the first one starts soon"
    assert admitted([replace(running, priority=-1), first, small]) == []


def test_a_run_that_has_overtaken_makes_room_as_soon_as_that_is_enough() -> None:
    running, first = entry("running", workers=2, state="running"), entry("first", at=1, workers=3)
    small = entry("small", at=2, state="running", overtook=("first",))
    assert leaving([running, first, small]) == [], "two workers are not enough"
    assert admitted([running, first, small, entry("other", at=3)]) == ["other"]
    assert leaving([running, replace(first, workers=1), small]) == [], "there is room"
    full = {"a": NodeResources(cpus=4, gpus=0, free_cpus=2, free_gpus=0)}
    assert leaving([first, small], full) == ["small"]
    assert leaving([first, replace(small, overtook=())], full) == []
    assert leaving([first, replace(small, overtook=("another",))], full) == []
    assert admitted([first, small, entry("other", at=3)], full) == [], "the first one starts soon"
    assert leaving([first, replace(small, state="yielding")], full) == []


def test_a_run_that_overtakes_loses_its_turn_when_the_first_one_could_start() -> None:
    running, first = entry("running", workers=2, state="running"), entry("first", at=1, workers=4)
    small = entry("small", at=2, state="reserving", overtook=("first",), workers_by_node={"a": 1})
    assert admitted([running, first, small]) == ["small"]
    assert admitted([replace(running, workers_by_node={"gone": 1}), first, small]) == []
    one = entry("one", at=3, priority=-1, state="running")
    assert admitted([one, first, small]) == [], "the run of lower priority makes room as well"
    assert leaving([one, first, small]) == ["one"]
    assert leaving([one, replace(first, workers=3), small]) == [], "the end of the other turn is enough"
    assert admitted([one, first, replace(small, overtook=())]) == ["small"], "the first one has come back to the line"


def test_a_node_on_which_a_run_may_not_start_is_none_for_it() -> None:
    nodes = {n: NodeResources(cpus=2, gpus=0, free_cpus=2, free_gpus=0) for n in "ab"}
    avoids = {"b": "is left out by cluster.exclude_nodes"}
    wide, other = entry("wide", workers=4), entry("other", at=1, workers=2)
    assert states_of(wide, nodes=nodes) == ["waiting"]
    assert states_of(replace(wide, avoids=avoids), nodes=nodes) == ["unfit"]
    holder = entry("holder", workers=2, state="running")
    first = replace(wide, workers=2, avoids=avoids)
    assert admitted([holder, first, other], nodes) == ["other"], "it takes what the first one cannot use"
    assert leaving([holder, replace(other, state="running", workers_by_node={"b": 2}), first], nodes) == []
    urgent = replace(first, priority=1)
    low = replace(other, state="running", workers_by_node={"b": 2})
    assert leaving([holder, low, urgent], nodes) == ["holder"], "the younger one has nothing for it"


def test_further_runs_of_a_user_with_a_share_go_behind_those_of_others() -> None:
    mine = [entry("mine", workers=2, state="running"), entry("next", at=1, user_share=0.5)]
    other = entry("other", at=2, user="bob", user_share=0.5)
    assert line_of(*mine, other) == ["other", "next"]
    assert line_of(*mine, replace(other, priority=-1)) == ["next", "other"], "priority comes first"
    assert line_of(*mine, replace(other, user="ada")) == ["next", "other"]
    assert line_of(mine[0], replace(mine[1], user_share=0.6), other) == ["next", "other"]
    assert line_of(mine[0], replace(mine[1], user_share=None), other) == ["next", "other"]
    assert line_of(replace(mine[0], workers_by_node={"gone": 2}), mine[1], other) == ["next", "other"]
    assert admitted(marked_over_share([*mine, replace(other, workers=3)], FOUR_CPUS)) == ["next"], "nothing stays idle"
    gpus = {"a": NodeResources(cpus=8, gpus=2, free_cpus=8, free_gpus=2)}
    training = replace(mine[0], workers=1, gpus_per_worker=1.0)
    on_gpus = replace(mine[1], gpus_per_worker=1.0)
    assert line_of(training, mine[1], other, nodes=gpus) == ["next", "other"], "it takes none of the GPUs"
    assert line_of(training, on_gpus, other, nodes=gpus) == ["other", "next"]


def line_of(*entries: QueueEntry, nodes: Mapping[str, NodeResources] = FOUR_CPUS) -> list[str]:
    return names(line(marked_over_share(entries, nodes)))


def test_what_ray_reports_late_is_not_given_twice() -> None:
    """A report that still has as free what a run in the queue has just taken, and one with other tasks."""
    running, waiting = entry("running", workers=4, state="running"), entry("waiting", at=1)
    assert admitted([running, waiting]) == []
    others = {"a": NodeResources(cpus=4, gpus=0, free_cpus=0, free_gpus=0)}
    assert admitted([replace(running, workers_by_node={"a": 1}), waiting], others) == []


def test_a_run_with_the_queue_to_itself_reserves_whatever_is_free() -> None:
    """Then the wait for resources says what it waits for, and for how long at most."""
    full = {"a": NodeResources(cpus=4, gpus=0, free_cpus=0, free_gpus=0)}
    assert admitted([entry("alone", workers=4)], full) == ["alone"]


def test_a_run_for_which_the_cluster_is_too_small_is_not_in_the_line() -> None:
    large, small = entry("large", priority=1, workers=5), entry("small", at=1)
    assert states_of(large, small) == ["unfit", "waiting"]
    assert states_of(replace(large, autoscaling=True), replace(large, state="running")) == ["waiting", "running"]
    assert states_of(replace(large, state="reserving")) == ["unfit"], "it gives its turn to the next one"
    assert states_of(replace(large, workers=4)) == ["waiting"]
    assert states_of(entry("running", workers=4, state="running"), entry("waiting")) == ["running", "waiting"]
    marked = marked_unfit([large, small], FOUR_CPUS)
    assert admitted(marked) == ["small"]
    nodes = {n: NodeResources(cpus=3, gpus=0, free_cpus=3, free_gpus=0) for n in "ab"}
    assert states_of(large, nodes=nodes) == ["waiting"]
    assert states_of(replace(large, one_node=True), nodes=nodes) == ["unfit"]


def states_of(*entries: QueueEntry, nodes: Mapping[str, NodeResources] = FOUR_CPUS) -> list[str]:
    return [e.state for e in marked_unfit(entries, nodes)]


def test_a_run_that_waits_says_what_it_needs_and_why_it_has_to_wait() -> None:
    four = NodeState(node_id="a", name="one", address="10.0.0.1", total={"CPU": 4, "GPU": 1}, free={"CPU": 4, "GPU": 1})
    state = ClusterState(nodes=[four])
    waiting = entry("waiting", workers=2, cpus_per_worker=0.5)
    assert why_waiting(waiting, state, now=0) == "there is room, but another run goes first"
    assert why_waiting(replace(waiting, state="reserving"), state, now=0).startswith("there is room, and Ray starts")
    unfit = replace(waiting, gpus_per_worker=1.0, one_node=True)
    assert why_waiting(unfit, state, now=0).startswith(
        "need 2 x {CPU: 0.5, GPU: 1} on one node; free 1; the cluster has room for 1 in all: add nodes, or lower "
    )


def test_a_cluster_that_adds_nodes_is_asked_for_them() -> None:
    running, growing = entry("running", workers=4, state="running"), entry("growing", at=1, autoscaling=True)
    assert admitted([running, growing]) == ["growing"]
    urgent = replace(growing, priority=1)
    assert (admitted([running, urgent]), leaving([running, urgent])) == ([], ["running"])
    assert admitted([replace(running, state="yielding"), urgent]) == []


@pytest.mark.parametrize(("one_node", "expected"), [(False, ["wide"]), (True, [])])
def test_workers_fit_node_by_node(one_node: bool, expected: list[str]) -> None:
    nodes = {n: NodeResources(cpus=3, gpus=1, free_cpus=3, free_gpus=1) for n in "ab"}
    holder = entry("holder", state="running", workers_by_node={"gone": 1})
    wide = entry("wide", at=1, workers=2, cpus_per_worker=2, gpus_per_worker=1, one_node=one_node)
    assert admitted([holder, wide], nodes) == expected
    assert admitted([holder, replace(wide, workers=3)], nodes) == []


def test_fractions_of_a_cpu_add_up() -> None:
    running = entry("running", workers=7, cpus_per_worker=0.1, state="running")
    one = {"a": NodeResources(cpus=1, gpus=0, free_cpus=0.3, free_gpus=0)}
    assert admitted([running, entry("waiting", at=1, workers=3, cpus_per_worker=0.1)], one) == ["waiting"]


def test_the_lowest_and_then_the_youngest_make_room() -> None:
    running = [
        entry("old", at=1, state="running"),
        entry("young", at=2, state="running"),
        entry("middle", at=0, priority=1, state="running"),
        entry("equal", at=0, priority=2, state="running"),
    ]
    urgent = entry("urgent", at=9, priority=2)
    assert leaving([*running, urgent]) == ["young"]
    assert leaving([*running, replace(urgent, workers=2)]) == ["young", "old"]
    assert leaving([*running, replace(urgent, workers=3)]) == ["young", "old", "middle"]
    assert leaving([*running, replace(urgent, workers=4)]) == [], "those of equal priority do not, so nobody does"
    assert leaving([*running, replace(urgent, priority=0)]) == []


def test_no_run_makes_room_in_vain() -> None:
    small, large = entry("small", at=2, state="running"), entry("large", at=1, workers=3, state="running")
    urgent = entry("urgent", at=9, priority=1, workers=3)
    assert leaving([small, large, urgent]) == ["large"], "the smaller one alone would not do, and is not needed"
    assert leaving([small, large, replace(urgent, workers=5)]) == []
    one = replace(urgent, workers=1)
    assert leaving([small, replace(large, state="yielding"), one]) == [], "another one is already leaving"
    assert leaving([small, large, replace(urgent, state="reserving")]) == []


class Parts:
    """A queue with a clock that the test sets, on nodes that it sets too: at first, one of four CPUs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.nodes = FOUR_CPUS
        self.queue = self.new()

    def new(self, *, settle_s: float = 0.0) -> RunQueue:
        self.queue = RunQueue(settle_s=settle_s, clock=lambda: self.now, nodes=lambda: self.nodes)
        return self.queue


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_a_run_learns_its_place_and_gets_its_turn(parts: Parts) -> None:
    first, second = entry("first", at=1, workers=4), entry("second", at=2, workers=4)
    assert parts.queue.poll(first).may_reserve
    answer = parts.queue.poll(second)
    assert (answer.may_reserve, answer.ahead, answer.running) == (False, ("first",), ())
    assert parts.queue.poll(first).may_reserve, "an answer that was lost is given again"
    assert not parts.queue.poll(entry("urgent", priority=1)).may_reserve, "the first may be reserving already"
    parts.queue.leave("urgent")
    answer = parts.queue.poll(replace(first, state="running", workers_by_node={"a": 4}))
    assert (answer.others_wait, answer.yield_to) == (True, None)
    answer = parts.queue.poll(second)
    assert (answer.may_reserve, answer.ahead, answer.running) == (False, (), ("first",))
    parts.queue.leave("first")
    assert parts.queue.poll(second).may_reserve


def test_a_cluster_that_shrinks_leaves_the_turn_to_a_run_that_still_fits(parts: Parts) -> None:
    large, small = entry("large", at=1, workers=4), entry("small", at=2)
    assert parts.queue.poll(large).may_reserve
    assert parts.queue.poll(small).ahead == ("large",)
    parts.nodes = {"a": NodeResources(cpus=1, gpus=0, free_cpus=1, free_gpus=0)}
    answer = parts.queue.poll(replace(large, state="reserving"))
    assert (answer.may_reserve, answer.unfit, answer.ahead) == (False, True, ())
    assert parts.queue.poll(small).may_reserve
    assert [(e.name, e.state) for e in parts.queue.entries()] == [("small", "reserving"), ("large", "unfit")]
    parts.nodes = FOUR_CPUS
    assert not parts.queue.poll(large).unfit
    assert not parts.queue.poll(large).may_reserve, "the other one may be reserving already"
    assert parts.queue.poll(replace(small, state="reserving")).may_reserve


def test_a_run_learns_which_ones_it_overtakes_and_the_queue_learns_it_from_its_driver(parts: Parts) -> None:
    running = entry("running", workers=3, state="running")
    first, small = entry("first", at=1, workers=4), entry("small", at=2)
    for run in (running, first):
        parts.queue.poll(run)
    answer = parts.queue.poll(small)
    assert (answer.may_reserve, answer.ahead, answer.overtakes) == (True, ("first",), ("first",))
    assert parts.queue.entries()[-1].overtook == ("first",)
    small = replace(small, state="reserving", overtook=answer.overtakes)
    assert parts.queue.poll(small).may_reserve
    small = replace(small, state="running", workers_by_node={"a": 1})
    queue = parts.new()
    assert queue.poll(small).yield_to is None
    assert not queue.poll(first).may_reserve
    assert queue.poll(small).yield_to == "first", "the other run has ended"
    assert queue.poll(replace(small, state="yielding")).yield_to is None
    assert not queue.poll(first).may_reserve
    assert not queue.poll(replace(small, state="waiting", workers_by_node={}, overtook=())).may_reserve
    answer = queue.poll(first)
    assert (answer.may_reserve, answer.overtakes) == (True, ())


def test_a_run_of_another_user_goes_before_further_ones_of_a_user_with_a_share(parts: Parts) -> None:
    parts.queue.poll(entry("mine", workers=4, state="running"))
    parts.queue.poll(entry("next", at=1, user_share=0.5))
    assert parts.queue.poll(entry("other", at=2, user="bob")).ahead == ()
    assert [(e.name, e.over_share) for e in parts.queue.entries()[1:]] == [("other", False), ("next", True)]
    parts.queue.leave("mine")
    assert parts.queue.poll(entry("next", at=1, user_share=0.5)).may_reserve


def test_a_run_whose_driver_is_silent_blocks_nobody(parts: Parts) -> None:
    first, second = entry("first", at=1, workers=3), entry("second", at=2, workers=3)
    assert parts.queue.poll(first).may_reserve
    parts.now += STALE_S
    assert not parts.queue.poll(second).may_reserve
    parts.now += 0.1
    assert parts.queue.poll(second).may_reserve
    assert names(parts.queue.entries()) == ["second"]


def test_a_queue_that_was_started_again_admits_nobody_before_it_knows_the_order(parts: Parts) -> None:
    queue = parts.new(settle_s=SETTLE_S)
    early, late, urgent = entry("early", at=1), entry("late", at=2), entry("urgent", at=3, priority=1, workers=4)
    running = entry("running", workers=4, state="running")
    assert not queue.poll(late).may_reserve
    assert not queue.poll(early).may_reserve
    assert queue.poll(replace(early, uid="was reserving", state="reserving")).may_reserve, "it keeps its turn"
    queue.leave("was reserving")
    queue.poll(urgent)
    assert queue.poll(running).yield_to is None
    parts.now += SETTLE_S
    assert queue.poll(running).yield_to == "urgent"
    queue.leave("urgent")
    queue.leave("running")
    assert not queue.poll(late).may_reserve
    assert queue.poll(early).may_reserve


def test_a_changed_priority_stays_with_the_run(parts: Parts) -> None:
    run, other = entry("run", at=2, workers=4), entry("other", at=1, workers=4, priority=1)
    parts.queue.poll(replace(other, uid="holder", state="running", workers_by_node={"a": 4}))
    parts.queue.poll(run)
    parts.queue.poll(other)
    assert names(parts.queue.entries())[1:] == ["other", "run"]
    parts.queue.set_priority("run", 7)
    assert names(parts.queue.entries())[1:] == ["run", "other"]
    assert parts.queue.poll(run).priority == 7, "its driver reports this one from then on"
    assert parts.new().poll(replace(run, priority=7)).priority == 7


def test_a_cancelled_run_is_told_who_did_it_but_not_the_next_one_of_its_uid(parts: Parts) -> None:
    parts.queue.cancel("run", "nobody")
    assert parts.queue.poll(entry("run")).cancelled_by is None
    parts.queue.cancel("run", "ada on laptop")
    assert parts.queue.poll(entry("run")).cancelled_by == "ada on laptop"
    parts.now += STALE_S + 1  # the driver was killed
    assert parts.queue.poll(entry("run")).cancelled_by is None


def test_a_run_is_found_by_its_name_or_the_end_of_its_location() -> None:
    runs = [entry("12-00-01-digits"), replace(entry("12-00-02-digits"), name="mine"), entry("12-00-02-other")]
    for text in ("12-00-01-digits", "2026-05-01/12-00-01-digits", "/outputs/2026-05-01/12-00-01-digits/"):
        assert find_entries(runs, text) == [runs[0]]
    assert find_entries(runs, "mine") == [runs[1]]
    assert find_entries(runs, "digits") == []
    one, two = (entry("gpt", uid=uid, state="running") for uid in ("ab12cd34ef", "77e01b34ef"))
    assert find_entries([one, two], "gpt") == [one, two]
    assert find_entries([one, two], "77e01b") == find_entries([one, two], "gpt-77e01b") == [two]


def test_a_run_learns_of_others_of_its_name_but_not_of_those_of_its_sweep(parts: Parts) -> None:
    parts.queue.poll(entry("gpt", uid="other"))
    parts.queue.poll(entry("digits", uid="third"))
    assert parts.queue.poll(entry("gpt", uid="mine")).namesakes == ("other",)
    parts.queue.poll(entry("gpt", uid="other", sweep="s1"))
    assert parts.queue.poll(entry("gpt", uid="mine", sweep="s1")).namesakes == ()
    assert parts.queue.poll(entry("gpt", uid="mine", sweep="s2")).namesakes == ("other",)


def test_an_address_without_ray_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert main(["--address", "nonsense", "cancel", "run"]) == 2
    golden.says(capsys.readouterr().err)


def test_the_table_has_places_and_needs_and_says_which_runs_are_not_in_the_order_of_submission(golden: Golden) -> None:
    runs = [
        entry("gpt", priority=2, workers=4, gpus_per_worker=1.0, state="running"),
        entry("small", state="running", overtook=("first", "gone", "second")),
        entry("done", state="running", overtook=("gone",)),
        entry("second", at=30, workers=4),
        entry("first", at=30, user_share=0.25, over_share=True),
        entry("large", at=30, workers=2000, state="unfit"),
    ]
    golden("report/queue", "\n".join([queue_table(runs, now=90), *order_notes(runs)]))
