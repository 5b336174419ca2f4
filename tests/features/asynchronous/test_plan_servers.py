"""Plans: the roles of workers and servers, room for all of them, the devices of one process; what is refused."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from helpers.files.golden import Golden
from helpers.machines.plans import GPU_BOX, LAPTOP, UNEVEN, errors_of, notes_of, plan_of
from jobs.resnet50 import ResNet50
from jobs.sparse import SparseLogistic
from jobs.toy import Toy
from orchestrator.display.report import plan_table
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Node

SERVER = ("strategy=parameter_server", "strategy.num_workers=3", "strategy.num_shards=2")


def test_servers_come_after_the_workers_and_read_no_data(golden: Golden) -> None:
    plan = plan_of(LAPTOP, *SERVER, "train.global_batch_size=10", embedded=True)
    assert (plan.world_size, plan.mesh) == (5, Mesh(replicate=3, num_servers=2))
    assert [w.samples_per_step for w in plan.workers] == [4, 3, 3, 0, 0]
    assert [w.server for w in plan.workers] == [None, None, None, 0, 1]
    assert [plan.display_name(rank) for rank in (2, 3, 4)] == ["rank 2", "rank 3 (server 0)", "rank 4 (server 1)"]
    golden.says(plan_table(plan, LAPTOP))


def test_servers_need_room_too() -> None:
    nodes = (Node(node_id="a", name="a", cpus=4, gpus=0),)
    assert errors_of(nodes, *SERVER)
    assert plan_of(nodes, *SERVER, "cluster.cpus_per_worker=0.8").world_size == 5


class Tiny(Toy):
    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters)


def test_more_servers_than_numbers_and_an_optimizer_that_cannot_be_cut(golden: Golden) -> None:
    many, one = (("strategy=parameter_server", f"strategy.num_shards={n}") for n in (4, 1))
    servers, optimizer = notes_of(Tiny(), *many)[1]
    golden.says([servers, optimizer])
    assert notes_of(Tiny(), *one)[1] == [optimizer]
    assert notes_of(SparseLogistic(), *many)[1] == []
    assert notes_of(Tiny(), "strategy=ddp") == ((), [])


def test_copies_of_servers_are_refused_with_what_to_set_instead(golden: Golden) -> None:
    assert notes_of(SparseLogistic(), "strategy=parameter_server")[1] == []
    golden.says(notes_of(SparseLogistic(), "strategy=parameter_server", "recovery.peer_copy_every=5")[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["strategy=parameter_server"], False),
        (["strategy=parameter_server", "strategy.consistency=async"], True),
        (["strategy=hogwild"], True),
        (["strategy=ddp"], False),
    ],
)
def test_running_statistics_of_workers_that_do_not_wait(words: list[str], warned: bool) -> None:
    notes, _ = notes_of(ResNet50(), *words)
    assert any(note.startswith("BatchNorm: ") for note in notes) == warned
    assert notes_of(SparseLogistic(), *words)[0] == ()


@pytest.mark.parametrize(("words", "devices"), [([], 4), (["recovery.spares=1"], 2), (["recovery.spares=2"], 1)])
def test_auto_gives_the_one_process_of_dp_the_gpus_of_the_largest_node(words: list[str], devices: int) -> None:
    plan = plan_of(UNEVEN, "strategy=dp", "cluster.cpus_per_worker=0.5", *words)
    assert (plan.world_size, plan.devices_per_worker, plan.gpus_per_worker) == (1, devices, devices)


@pytest.mark.parametrize("strategy", ["hogwild", "locked_sgd", "parameter_server"])
def test_a_strategy_for_cpus_leaves_the_gpus_unused_unless_they_are_demanded(strategy: str) -> None:
    plan = plan_of(GPU_BOX, f"strategy={strategy}")
    assert (plan.device, plan.mesh.num_workers, plan.gpus_per_worker) == ("cpu", 2, 0)
    assert any(note.startswith(f"strategy={strategy} leaves the GPUs unused: its workers ") for note in plan.notes)
    for nodes, word in ((LAPTOP, "cluster.device=auto"), (GPU_BOX, "cluster.device=cpu")):
        assert not any("unused" in note for note in plan_of(nodes, f"strategy={strategy}", word, embedded=True).notes)


def test_workers_that_share_memory_fit_on_one_node_with_their_spares() -> None:
    nodes = tuple(Node(node_id=n, name=n, cpus=2, gpus=0) for n in "ab")
    assert plan_of(nodes, "strategy=hogwild", "strategy.num_workers=2").one_node
