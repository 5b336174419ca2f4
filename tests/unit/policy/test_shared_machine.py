"""What other programs used of the machines of a run."""

from __future__ import annotations

import pytest

from orchestrator.policy.straggler import SharedMachine
from orchestrator.protocol.machine_use import MachineUse, describe_sharing


def test_what_the_ranks_and_the_driver_used_is_no_use_by_others() -> None:
    machine = SharedMachine()
    for _ in range(10):  # 2 CPUs
        for rank in (0, 1):
            machine.add(rank, "a", MachineUse(own_s=0.9, busy_s=1.95, idle_s=0.05))
    summary = machine.summary(driver_node="a", driver_s=1.0)
    assert summary == pytest.approx({"others_cpu_pct": 2.5, "idle_cpu_pct": 2.5})
    assert describe_sharing(summary) is None


def test_the_node_counts_of_which_others_used_the_most() -> None:
    machine = SharedMachine()
    machine.add(0, "a", MachineUse(own_s=1.0, busy_s=1.0, idle_s=1.0))
    machine.add(1, "b", MachineUse(own_s=0.6, busy_s=2.0, idle_s=0.0))
    summary = machine.summary(driver_node="a", driver_s=0.0)
    assert summary == pytest.approx({"others_cpu_pct": 70.0, "idle_cpu_pct": 0.0})
    assert describe_sharing(summary) == "70% of the CPUs"


def test_cpus_of_which_more_stand_idle_are_taken_from_nobody() -> None:
    machine = SharedMachine()
    machine.add(0, "a", MachineUse(own_s=4.0, busy_s=24.0, idle_s=40.0))
    summary = machine.summary(driver_node="a", driver_s=0.0)
    assert summary["others_cpu_pct"] == pytest.approx(31.25)
    assert describe_sharing(summary) is None


def test_ranks_that_came_later_have_measured_a_part() -> None:
    machine = SharedMachine()
    for _ in range(3):
        machine.add(0, "a", MachineUse(own_s=1.0, busy_s=1.0, idle_s=1.0))
    machine.add(1, "a", MachineUse(own_s=0.5, busy_s=2.0, idle_s=0.0))
    assert machine.summary(driver_node="", driver_s=0.0) == {"others_cpu_pct": 0.0, "idle_cpu_pct": 50.0}


def test_nothing_measured_is_nothing_said() -> None:
    assert SharedMachine().summary(driver_node="a", driver_s=1.0) == {}
    assert describe_sharing({}) is None


def test_the_use_of_a_gpu_by_others_is_told() -> None:
    machine = SharedMachine()
    for pct in (10.0, 50.0):
        machine.add(1, "a", MachineUse(own_s=1.0, busy_s=1.0, idle_s=9.0, others_gpu_pct=pct))
    assert describe_sharing(machine.summary(driver_node="a", driver_s=0.0)) == "30% of a GPU"
