"""Which GPUs a run may use, and in which precision."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from helpers.conformance.cases import having
from helpers.files.golden import Golden
from helpers.machines.plans import worker_on
from orchestrator.policy.worker_gpus import can_join, shared_gpu, unusable_gpus, with_common_precision
from orchestrator.protocol.messages import WorkerInfo
from orchestrator.worker.process.gpu import gpu_error, has_bf16


def test_two_workers_on_one_gpu_are_refused(golden: Golden) -> None:
    assert shared_gpu([worker_on("10.0.0.1", 0, "a"), worker_on("10.0.0.1", 1, "b"), worker_on("10.0.0.1")]) is None
    error = shared_gpu([worker_on("10.0.0.1", 0, "a"), worker_on("10.0.0.1", 1, "a")])
    golden.says(error)


def test_workers_from_which_ray_hides_no_gpu_are_told_of_the_variable(golden: Golden) -> None:
    """With fewer workers, one GPU would be used of several."""
    every = [replace(worker_on("10.0.0.1", index, "a"), sees_all_gpus=True) for index in range(2)]
    error = shared_gpu(every)
    golden.says(error)
    assert "strategy.num_workers" not in error


def broken(ip: str) -> WorkerInfo:
    return WorkerInfo(node_id=ip, node_ip=ip, hostname="box", pid=1, gpu_error="GPU 3: no kernel image")


def test_a_run_that_asks_for_gpus_is_refused_if_one_cannot_be_used(golden: Golden) -> None:
    usable = worker_on("10.0.0.1", 0, "a")
    assert unusable_gpus([usable, worker_on("10.0.0.1", 1, "b")], "cuda") is None
    for requested in ("auto", "cuda"):
        golden.says(unusable_gpus([usable, broken("10.0.0.2")], requested))


def test_a_run_on_any_device_trains_on_cpus_if_no_gpu_can_be_used() -> None:
    assert unusable_gpus([broken("10.0.0.1"), broken("10.0.0.2")], "auto") is None
    assert unusable_gpus([worker_on("10.0.0.1"), worker_on("10.0.0.2")], "cpu") is None
    assert unusable_gpus([broken("10.0.0.1"), broken("10.0.0.2")], "cuda") is not None


def test_a_spare_joins_if_it_can_use_what_the_members_use() -> None:
    on_gpu, on_cpu = worker_on("10.0.0.1", 0, "a"), worker_on("10.0.0.1")
    assert can_join(worker_on("10.0.0.2", 0, "b"), [on_gpu])
    assert not can_join(broken("10.0.0.2"), [on_gpu])
    assert can_join(broken("10.0.0.2"), [on_cpu])


def with_bf16(ip: str) -> WorkerInfo:
    return replace(worker_on(ip, 0, ip), has_bf16=True)


@pytest.mark.parametrize(
    ("requested", "workers", "refused", "expected"),
    [
        ("auto", [with_bf16("10.0.0.1"), with_bf16("10.0.0.2")], (), "bf16"),
        ("auto", [with_bf16("10.0.0.1"), worker_on("10.0.0.2", 0, "old")], (), "fp32"),
        ("auto", [worker_on("10.0.0.1")], (), "fp32"),
        ("auto", [with_bf16("10.0.0.1")], ("bf16",), "fp32"),
        ("fp16", [with_bf16("10.0.0.1")], (), "fp16"),
        ("bf16", [worker_on("10.0.0.1")], (), "bf16"),
    ],
    ids=["every GPU has it", "one GPU lacks it", "CPUs", "refused", "given", "given on CPUs"],
)
def test_auto_is_the_precision_that_every_device_has(
    requested: str, workers: list[WorkerInfo], refused: tuple[str, ...], expected: str
) -> None:
    train = with_common_precision(having(precision=requested), workers, refused=refused)
    assert train.precision == expected


@pytest.mark.parametrize(("capabilities", "expected"), [([8, 9], True), ([9, 7], False), ([], False)])
def test_a_worker_has_bfloat16_if_all_its_gpus_have_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[int], expected: bool
) -> None:
    current: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: capabilities[current[-1]] >= 8)
    assert has_bf16(len(capabilities)) == expected


def test_a_long_list_of_unusable_gpus_is_cut() -> None:
    error = unusable_gpus([broken(f"10.0.0.{n}") for n in range(9)], "cuda")
    assert "10.0.0.3" in error
    assert "10.0.0.4" not in error
    assert "; and 5 more. " in error


def test_a_gpu_that_torch_cannot_compute_on_is_named_with_the_reason() -> None:
    number = torch.cuda.device_count()  # one more than there are
    error = gpu_error([f"id{n}" for n in range(number + 1)])
    assert error.startswith(f"GPU id{number}: ")
    assert "\n" not in error
    assert gpu_error([]) is None
