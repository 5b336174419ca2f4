"""What a job's model does while it is checked happens in a child process, whose death is a sentence."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.conformance.cases import DDP, Case, config_of, plan_of
from helpers.conformance.layouts import pipeline
from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from helpers.machines import plans
from helpers.records.runs import in_campaign
from orchestrator.config.build import ConfigError
from orchestrator.config.schema import StrategyConfig
from orchestrator.driver.preflight.child_checks import check_job, plan_sizes
from orchestrator.driver.preflight.child_process import ChildDiedError, in_child
from orchestrator.job import Split
from orchestrator.planning.plan import Node
from orchestrator.strategies import registry

TIMEOUT_S = 60.0


def test_the_result_is_that_of_another_process_with_one_thread() -> None:
    pid, threads = in_child(lambda: (os.getpid(), torch.get_num_threads()), timeout_s=TIMEOUT_S)
    assert pid != os.getpid()
    assert threads == 1


def test_an_error_has_its_type_and_its_traceback() -> None:
    def refuse() -> None:
        raise ConfigError(["one", "two"])

    with pytest.raises(ConfigError) as raised:
        in_child(refuse, timeout_s=TIMEOUT_S)
    assert raised.value.errors == ("one", "two")
    assert "in refuse" in raised.value.__notes__[0]


def test_an_error_that_cannot_be_pickled_keeps_its_text() -> None:
    class LocalError(Exception):
        pass

    def fail() -> None:
        raise LocalError("why")

    with pytest.raises(RuntimeError, match="LocalError: why"):
        in_child(fail, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("function", "timeout_s", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), TIMEOUT_S, "was ended by SIGKILL"),
        (lambda: os._exit(3), TIMEOUT_S, "ended with exit code 3"),
        (lambda: time.sleep(60), 0.1, r"took longer than recovery\.build_max_s=0\.1"),
    ],
)
def test_a_child_that_dies_is_a_sentence(function: Callable[[], None], timeout_s: float, said: str) -> None:
    with pytest.raises(ChildDiedError, match=said):
        in_child(function, timeout_s=timeout_s)


@pytest.mark.campaign
def test_a_backward_pass_that_no_fork_can_run_runs_in_a_new_process() -> None:
    """In a CUDA build, fake tensors and a backward pass start the threads that a GPU has."""
    script = """
import os, torch
from orchestrator.compat.torch import FakeTensorMode
from orchestrator.driver.preflight.child_process import in_child
def backward():
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    return x.grad.tolist()
with FakeTensorMode():
    torch.ones(3) + 1
backward()
print(in_child(backward, timeout_s=60))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[2.0, 2.0, 2.0]\n", done.stderr


class Crashes(Toy):
    def model(self) -> nn.Module:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().model()


def checked(options: StrategyConfig) -> tuple[tuple[str, ...], list[str]]:
    config, errors = config_of(Case(job=Crashes(), options=options), 2), list[str]()
    notes = check_job(registry.load(options.name), config, Crashes(), plan_of(config), errors)
    return notes, errors


def test_a_model_that_crashes_its_process_is_refused_where_the_workers_would_crash_too(golden: Golden) -> None:
    notes, [error] = checked(pipeline("1F1B", 2))
    assert notes == ()
    golden.says(error)


def test_it_is_a_note_elsewhere(golden: Golden) -> None:
    [note], errors = checked(DDP)
    assert errors == []
    golden.says(note)


class OnTasks(Toy):
    """Its data is made by a function that needs a Ray, which this process is not connected to."""

    def dataset(self, split: Split) -> Any:
        return lambda epoch: None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "initial"),
    [
        (["strategy.num_workers=[1,8]"], 3),
        (["strategy.num_workers=[1,8]", "cluster.cpus_per_worker=1.5"], 2),
        (["strategy.num_workers=[4,8]"], None),
        (["strategy.num_workers=[1,8]", "cluster.autoscaling=true"], 8),
    ],
)
def test_each_size_of_an_elastic_run_leaves_a_cpu_for_the_tasks_of_its_data(
    words: list[str], initial: int | None
) -> None:
    """The size with room on nodes that are there; a cluster that adds nodes adds them for the data, too."""
    nodes = (Node(node_id="a", name="a", cpus=3, gpus=0), Node(node_id="b", name="b", cpus=1, gpus=0))
    errors: list[str] = []
    config = plans.config_of("strategy=ddp", "train.global_batch_size=64", *words)
    sizes = plan_sizes(config, OnTasks(), nodes, errors, oversubscribe_cpus=False)
    if sizes is None:
        assert initial is None
        (error,) = errors
        assert error.startswith("job.dataset: the data is read by tasks beside the workers, and 4 x 1 of the 4 CPUs ")
    else:
        assert (sizes.initial.world_size, sizes.largest.world_size) == (initial, 8)
        assert sizes.cpus_of_data == (0 if config.cluster.autoscaling else 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [pipeline("1F1B", 2), *in_campaign(DDP)], ids=["pipeline", "ddp"])
def test_data_that_only_a_cluster_can_read_is_no_secret(options: StrategyConfig) -> None:
    """A strategy that needs samples gets them from a process with a Ray of its own, or an error of that."""
    config, errors = replace(config_of(Case(job=OnTasks(), options=options), 2), plan=True), list[str]()
    config = replace(config, recovery=replace(config.recovery, build_max_s=200))
    notes = check_job(registry.load(options.name), config, OnTasks(), plan_of(config), errors)
    assert notes[-1] == "the data is read by tasks beside the workers, on the cores of this machine"
    needed = (
        "read by tasks of a cluster, and no sample of it can be read now: job.dataset('train') returns a function that "
        "makes a NoneType; let it make a ray.data.Dataset"
    )
    assert errors == ([] if options is DDP else [f"strategy=pipeline: job.dataset('train') is {needed}"])
