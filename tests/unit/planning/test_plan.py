"""The plan is a pure function of the configuration and the nodes: no Ray, no torch, no waiting."""

import pickle

import pytest

from helpers.files.golden import Golden
from helpers.machines.plans import GPU_BOX, LAPTOP, UNEVEN, errors_of, plan_of
from orchestrator.planning.capacity import cpus_for_data
from orchestrator.planning.mesh import Resources, workers_on_node, workers_on_nodes
from orchestrator.planning.plan import Node, Plan


def shares(plan: Plan) -> list[int]:
    return [w.samples_per_step for w in plan.workers]


# How many workers, on what ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "words", "workers", "device"),
    [
        (LAPTOP, [], 2, "cpu"),
        (GPU_BOX, [], 4, "cuda"),
        (UNEVEN, [], 5, "cuda"),
        (GPU_BOX, ["cluster.device=cpu"], 2, "cpu"),
        (GPU_BOX, ["strategy=single"], 1, "cuda"),
        (GPU_BOX, ["strategy=single", "strategy.num_workers=auto"], 1, "cuda"),
        (LAPTOP, ["strategy=single", "strategy.num_workers=auto"], 1, "cpu"),
        (UNEVEN, ["strategy=hsdp", "strategy.shard_size=2"], 4, "cuda"),
        (UNEVEN, ["strategy=hsdp"], 4, "cuda"),
        (GPU_BOX, ["strategy.num_workers=3"], 3, "cuda"),
        (UNEVEN, ["cluster.device=cpu", "strategy.num_workers=42"], 42, "cpu"),
    ],
)
def test_auto_takes_every_gpu_or_two_workers_on_cpus(
    nodes: tuple[Node, ...], words: list[str], workers: int, device: str
) -> None:
    plan = plan_of(nodes, *words)
    assert (plan.world_size, plan.device, len(plan.workers)) == (workers, device, workers)
    assert plan.gpus_per_worker == (1 if device == "cuda" else 0)


@pytest.mark.parametrize(
    ("nodes", "words", "workers"),
    [
        (GPU_BOX, ["recovery.spares=1"], 3),
        (UNEVEN, ["recovery.spares=2"], 3),
        (UNEVEN, ["strategy=pipeline", "recovery.spares=1"], 4),
        (UNEVEN, ["strategy=ddp_pipeline"], 4),
        (UNEVEN, ["strategy=ddp_pipeline", "recovery.spares=2"], 2),
        (GPU_BOX, ["strategy=single", "recovery.spares=3"], 1),
    ],
)
def test_auto_leaves_gpus_for_the_spares_and_completes_every_replica(
    nodes: tuple[Node, ...], words: list[str], workers: int
) -> None:
    assert plan_of(nodes, *words).world_size == workers


@pytest.mark.parametrize(
    ("nodes", "words", "processes"),
    [
        (LAPTOP, [], 0),
        (UNEVEN, [], 1),
        (UNEVEN, ["cluster.device=cpu"], 0),
        (UNEVEN, ["data.num_workers=3"], 3),
        (LAPTOP, ["data.num_workers=3"], 3),
        ((Node(node_id="a", name="big", cpus=64, gpus=4),), [], 8),
        ((Node(node_id="a", name="poor", cpus=1, gpus=4),), ["cluster.cpus_per_worker=0.1"], 0),
    ],
)
def test_auto_takes_loader_processes_from_the_cores_per_gpu(
    nodes: tuple[Node, ...], words: list[str], processes: int
) -> None:
    plan = plan_of(nodes, *words)
    assert plan.loader_processes == processes
    noted = f"data.num_workers=auto: {processes} data-loading processes per worker"
    assert (noted in plan.notes) == (processes > 0 and not any(word.startswith("data.") for word in words))


def test_ranks_count_up_in_data_parallel_order() -> None:
    plan = plan_of(UNEVEN)
    assert [w.global_rank for w in plan.workers] == [w.dp_rank for w in plan.workers] == [0, 1, 2, 3, 4]
    assert {w.pp_rank for w in plan.workers} == {0}


def test_the_plan_says_what_was_asked() -> None:
    plan = plan_of(LAPTOP, "job=gpt", "strategy=single", "train.steps=7", "name=mine", "train.grad_accumulation=2")
    assert (plan.run_name, plan.strategy, plan.job, plan.steps) == ("mine", "single", "gpt", 7)
    assert (plan.global_batch_size, plan.grad_accumulation) == (64, 2)


def test_a_plan_travels() -> None:
    plan = plan_of(UNEVEN)
    assert pickle.loads(pickle.dumps(plan)) == plan


# The batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "workers", "expected"),
    [(64, 2, [32, 32]), (65, 2, [33, 32]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1]), (1, 1, [1])],
)
def test_the_batch_is_shared_out_to_the_last_sample(batch: int, workers: int, expected: list[int]) -> None:
    plan = plan_of(LAPTOP, f"train.global_batch_size={batch}", f"strategy.num_workers={workers}", embedded=True)
    assert shares(plan) == expected
    assert any("shares of the batch differ" in n for n in plan.notes) == (len(set(expected)) > 1)


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["train.global_batch_size=3", "strategy.num_workers=4"], 4),
        (["train.global_batch_size=7", "strategy.num_workers=4", "train.grad_accumulation=2"], 8),
        (["train.global_batch_size=1"], 2),
    ],
)
def test_every_slice_of_every_worker_needs_a_sample(words: list[str], least: int) -> None:
    assert f"at least {least}," in errors_of(LAPTOP, *words, embedded=True)[0]
    plan_of(LAPTOP, f"train.global_batch_size={least}", *words[1:], embedded=True)


# Capacity -----------------------------------------------------------------------------------------


def test_cpus_of_different_nodes_do_not_add_up_to_one_worker() -> None:
    nodes = tuple(Node(node_id=n, name=n, cpus=3, gpus=0) for n in "ab")
    plan_of(nodes, "cluster.cpus_per_worker=2", "strategy.num_workers=2")


def test_a_gpu_without_enough_cpus_beside_it_is_no_room() -> None:
    nodes = (Node(node_id="a", name="a", cpus=2, gpus=8),)
    assert plan_of(nodes, "cluster.cpus_per_worker=0.25").world_size == 8


@pytest.mark.parametrize(("share", "workers"), [(0.1, 10), (0.3, 3), (0.5, 2), (0.2, 5), (0.0001, 10_000)])
def test_fractions_of_a_cpu_fill_it_exactly(share: float, workers: int) -> None:
    nodes = (Node(node_id="a", name="a", cpus=1, gpus=0),)
    words = [f"cluster.cpus_per_worker={share}", f"train.global_batch_size={workers + 1}"]
    assert plan_of(nodes, *words, f"strategy.num_workers={workers}").world_size == workers
    assert "there is room for" in errors_of(nodes, *words, f"strategy.num_workers={workers + 1}")[0]


def test_a_cluster_that_grows_is_asked_for_more_than_it_has() -> None:
    grows = "cluster.autoscaling=true"
    assert plan_of(LAPTOP, grows, "strategy.num_workers=60").world_size == 60
    plan = plan_of((), grows, "cluster.device=cuda", "strategy.num_workers=8")
    assert (plan.world_size, plan.device, plan.gpus_per_worker) == (8, "cuda", 1)


@pytest.mark.needs("asynchronous")
def test_what_does_not_fit_is_refused(golden: Golden) -> None:
    """On this machine, or on nodes: ``8+4,2+1`` is one of 8 CPUs and 4 GPUs, and one of 2 CPUs and 1 GPU."""

    def errors(nodes: str, *words: str) -> tuple[str, ...]:
        if nodes == "here":
            return errors_of(LAPTOP, *words, embedded=True)
        sizes = [map(int, size.split("+")) for size in nodes.split(",") if size]
        cluster = [Node(node_id=f"{i}", name=f"n{i}", cpus=cpus, gpus=gpus) for i, (cpus, gpus) in enumerate(sizes)]
        return errors_of(tuple(cluster), *words)

    golden.answers("errors/plan", lambda *words: "\n".join(errors(*words)))


# The machine at hand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_nodes", "workers", "cpus", "left"),
    [
        ((3, 1), 2, 1, "2 of 4"),
        ((3, 1), 3, 1, "1 of 4"),
        ((3, 1), 1, 3, "1 of 4"),
        ((3, 1), 2, 1.5, "1 of 4"),
        ((3, 1), 4, 1, None),
        ((2, 2), 2, 1.5, None),
    ],
)
def test_data_that_needs_tasks_needs_a_cpu_beside_the_workers(
    of_nodes: tuple[int, int], workers: int, cpus: float, left: str | None
) -> None:
    """On one node: half a CPU on each of two is none."""
    nodes = tuple(Node(node_id=f"{i}", name=f"{i}", cpus=number, gpus=0) for i, number in enumerate(of_nodes))
    words = (f"strategy.num_workers={workers}", f"cluster.cpus_per_worker={cpus}")
    note, error = cpus_for_data(plan_of(nodes, *words), nodes)
    if left is None:
        assert error.startswith(
            f"job.dataset: the data is read by tasks beside the workers, and {workers} x {cpus} of "
        )
    else:
        assert (note, error) == (f"the data is read by tasks beside the workers, on {left} CPUs", None)


@pytest.mark.parametrize(("workers", "threads"), [(1, 2), (2, 1), (5, 1)])
def test_an_embedded_ray_shares_the_cores_out_and_never_runs_short(workers: int, threads: int) -> None:
    plan = plan_of(LAPTOP, f"strategy.num_workers={workers}", embedded=True)
    assert plan.threads_per_worker == threads
    assert any("share 2 cores" in n for n in plan.notes) == (workers > 2)


@pytest.mark.parametrize(("share", "threads"), [("1", 1), ("4", 4), ("2.5", 2), ("0.5", 1)])
def test_on_a_cluster_a_worker_uses_the_cpus_it_asked_for(share: str, threads: int) -> None:
    assert plan_of(UNEVEN, f"cluster.cpus_per_worker={share}", "strategy.num_workers=2").threads_per_worker == threads


@pytest.mark.parametrize(
    ("words", "embedded", "noted"),
    [
        (["strategy.cpu_offload=true"], False, True),
        (["strategy.cpu_offload=true", "cluster.cpus_per_worker=2"], False, False),
        (["strategy.cpu_offload=true"], True, False),  # there, the key changes nothing
        ([], False, False),
    ],
)
def test_updates_by_one_thread_are_noted(words: list[str], embedded: bool, noted: bool) -> None:
    plan = plan_of(UNEVEN, "strategy=fsdp", "strategy.num_workers=2", *words, embedded=embedded)
    assert any("cluster.cpus_per_worker" in note for note in plan.notes) == noted


def test_auto_is_noted_where_it_may_be_bfloat16() -> None:
    note = "train.precision=auto: bf16 if all GPUs have it, else fp32"
    assert note in plan_of(GPU_BOX).notes
    assert note not in plan_of(GPU_BOX, "train.precision=fp32").notes
    assert note not in plan_of(LAPTOP).notes


# How many workers fit on nodes --------------------------------------------------------------------


SMALL, LARGE = {"CPU": 2.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("each", "available", "expected"),
    [
        ({"CPU": 1}, LARGE, 8),
        ({"CPU": 3}, LARGE, 2),
        ({"CPU": 1, "GPU": 1}, LARGE, 2),
        ({"CPU": 1, "GPU": 0}, LARGE, 8),
        ({"GPU": 1}, {"CPU": 8}, 0),
        ({"CPU": 1}, {"CPU": -1}, 0),
        ({"CPU": 0.1}, {"CPU": 1.0}, 10),
        ({"CPU": 0.1}, {"CPU": 1.0 - 7 * 0.1}, 3),
        ({"CPU": 1 / 3}, {"CPU": 1.0}, 3),
        ({"CPU": 1e-6}, {"CPU": 1.0}, 10_000),
    ],
)
def test_the_scarcest_resource_of_a_node_decides(each: Resources, available: Resources, expected: int) -> None:
    assert workers_on_node(each, available) == expected


def test_a_worker_has_all_it_needs_on_one_node() -> None:
    assert workers_on_nodes({"CPU": 1}, [{"CPU": 0.5}, {"CPU": 0.5}]) == 0


def test_nodes_add_up_unless_all_workers_share_one() -> None:
    assert workers_on_nodes({"CPU": 1}, [SMALL, LARGE]) == 10
    assert workers_on_nodes({"CPU": 1}, [SMALL, LARGE], one_node=True) == 8
    assert workers_on_nodes({"CPU": 1}, [], one_node=True) == 0
