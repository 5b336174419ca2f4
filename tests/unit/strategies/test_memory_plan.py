"""The memory of a worker in the plan, and the refusal of what cannot fit."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.conformance import cases
from helpers.conformance.cases import DDP, RECOVERY, TRAIN, Case
from helpers.conformance.layouts import FSDP, LAYOUTS, mesh
from helpers.jobs.toys import Toy
from orchestrator.config.schema import StrategyConfig, TrainConfig
from orchestrator.job import Job
from orchestrator.planning.memory import GIB, MIB, MemoryLimit, NodeShare
from orchestrator.planning.mesh import Mesh


class Wide(Toy):
    """1,000 times 10 weights, which make 1,000 activations of a sample, and as many after the tanh."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 1000, bias=False), nn.Tanh(), nn.Linear(1000, 4, bias=False))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    def loss(self, output: Any, target: Any) -> Tensor:
        return output.sum()


WEIGHTS = 4 * 14_000
"""Bytes."""


def checked(
    options: StrategyConfig,
    workers: int,
    *,
    job: Job | None = None,
    limit: MemoryLimit | None = None,
    train: TrainConfig = TRAIN,
    peer_copy_every: int = 0,
    **planned: Any,
) -> tuple[list[str], str]:
    """The errors and the notes about memory in ``plan=true``; ``planned``: what the plan has else."""
    case = Case(job=job or Wide(), options=options, train=train)
    config = {"plan": True, "recovery": replace(RECOVERY, peer_copy_every=peer_copy_every)}
    errors, notes = cases.checked(case, workers, config=config, **(planned if limit is None else {"memory": limit}))
    return errors, "; ".join(note for note in notes if "memory of a " in note or "estimated" in note)


def mib(size: float) -> str:
    return f"{size / MIB:.3g} MiB"


@pytest.mark.parametrize(
    ("name", "parts"), [("single", 1), ("ddp-2", 1), ("fsdp-2", 2), ("hsdp-2x2", 2), ("1F1B-2", 2), ("1F1B-2x2", 2)]
)
def test_each_strategy_tells_what_a_worker_keeps(name: str, parts: int) -> None:
    layout = LAYOUTS[name]
    errors, note = checked(layout.options, layout.world_size)
    assert errors == []
    weights = WEIGHTS / parts
    expected = [f"{mib(weights)} of parameters", f"{mib(weights)} of gradients", f"{mib(2 * weights)} of optimizer"]
    assert f"memory of a worker: {', '.join(expected)} state" in note
    assert ("gathered" in note) == ("sdp" in name)


@pytest.mark.parametrize(("reshard", "gathered"), [(False, WEIGHTS / 2), (True, 2 * WEIGHTS)])
def test_divided_stages_have_whole_gradients_in_a_step(reshard: bool, gathered: float) -> None:
    layout = LAYOUTS["fsdp-1F1B-2x2"]
    errors, note = checked(replace(layout.options, reshard_after_forward=reshard), 4)
    assert errors == []
    assert f"{mib(WEIGHTS / 4)} of parameters, {mib(WEIGHTS / 2)} of gradients, {mib(WEIGHTS / 2)} of optimizer" in note
    assert f"{mib(gathered)} gathered from other workers" in note


def test_the_optimizer_alone_may_be_divided() -> None:
    errors, note = checked(replace(DDP, shard_optimizer=True), 4)
    assert errors == []
    assert f"{mib(WEIGHTS)} of parameters, {mib(WEIGHTS)} of gradients, {mib(WEIGHTS / 2)} of optimizer state" in note


def test_activations_are_those_that_the_backward_pass_needs() -> None:
    # Ten inputs of the first layer and the output of tanh, for each of 32 samples of a slice.
    assert f"about {mib(32 * 4 * 1010)} of activations" in checked(DDP, 2)[1]
    assert f"about {mib(16 * 4 * 1010)} of activations" in checked(DDP, 2, train=replace(TRAIN, grad_accumulation=2))[1]


class Mask(nn.Module):
    """Keeps ten thousand numbers, whatever the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.ones(10_000, requires_grad=True) * torch.ones(10_000)).sum()


class Twice(nn.Module):
    """A block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Masked(Wide):
    """A mask and two blocks, and 5,010 activations of a sample."""

    def model(self) -> nn.Module:
        first = nn.Linear(10, 1000, bias=False)
        return nn.Sequential(Mask(), first, nn.Tanh(), Twice(), Twice(), nn.Linear(1000, 4))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "casts"), [("single", 1), ("ddp-2", 1), ("sharded-ddp-2", 1), ("GPipe-2", 4 / 2), ("1F1B-2", 2 / 2)]
)
def test_casts_of_parameters_count_once_in_a_pass(name: str, casts: float, precision: Any) -> None:
    """Each micro-batch in flight has those of its stage; two stages are half of the model each."""
    layout = LAYOUTS[name]
    errors, note = checked(layout.options, layout.world_size, train=replace(TRAIN, precision=precision))
    assert errors == []
    rows = {"single": 64, "ddp-2": 32, "sharded-ddp-2": 32}.get(name, casts * 16)
    kept = f"{mib(casts * WEIGHTS / 2)} of casts to {'bfloat16' if precision == 'bf16' else 'float16'}, "
    assert f"{kept}about {mib(rows * 2 * 1010)} of activations" in note


def test_parts_have_no_casts() -> None:
    assert "casts" not in checked(FSDP, 2, train=replace(TRAIN, precision="bf16"))[1]


@pytest.mark.parametrize(("recomputed", "numbers"), [("none", 5010), ("blocks", 3010), ("selective", 5010)])
def test_a_mask_does_not_grow_with_the_batch_and_blocks_keep_their_input_alone(recomputed: Any, numbers: int) -> None:
    said = checked(DDP, 2, job=Masked(), train=replace(TRAIN, activation_checkpointing=recomputed))[1]
    assert f"about {mib(4 * 10_000 + 32 * 4 * numbers)} of activations" in said


def test_the_types_of_what_is_kept_and_computed_are_named() -> None:
    assert checked(FSDP, 2)[1].endswith("parameters are kept, gathered and summed in float32")
    said = checked(FSDP, 2, train=replace(TRAIN, precision="bf16"))[1]
    assert said.endswith("summed in float32; passes compute in bfloat16")
    assert checked(FSDP, 2, train=replace(TRAIN, precision="bf16-true"))[1].endswith("summed in bfloat16")


def test_an_average_of_the_weights_counts_as_optimizer_state() -> None:
    assert f"{mib(3 * WEIGHTS)} of optimizer state" in checked(DDP, 2, train=replace(TRAIN, ema_decay=0.9))[1]
    half = replace(TRAIN, ema_decay=0.9, precision="bf16-true")
    assert f"{mib(2 * WEIGHTS)} of optimizer state" in checked(DDP, 2, train=half)[1]  # the average has float32


@pytest.mark.parametrize(
    ("options", "workers", "limit", "remedy"),
    [
        (DDP, 2, MemoryLimit(largest_bytes=WEIGHTS), "strategy.num_workers=4 or more"),
        (FSDP, 2, MemoryLimit(largest_bytes=WEIGHTS), "strategy.num_workers=4 or more"),
        (DDP, 4, MemoryLimit(largest_bytes=8 * WEIGHTS, total_bytes=8 * WEIGHTS), "strategy.num_workers=2 or more"),
        (DDP, 2, MemoryLimit(largest_bytes=2 * WEIGHTS, total_bytes=2 * WEIGHTS), "add memory, or use a smaller model"),
    ],
)
def test_a_state_that_cannot_fit_is_refused_with_the_fewest_workers(
    options: StrategyConfig, workers: int, limit: MemoryLimit, remedy: str
) -> None:
    errors, _ = checked(options, workers, limit=limit)
    assert len(errors) == 1
    assert errors[0].startswith(f"strategy={options.name}: parameters, gradients and optimizer state take ")
    assert remedy in errors[0]


@pytest.mark.slow
def test_layers_that_are_divided_count_in_part_and_the_workers_that_divide_them_together() -> None:
    part = 4 * (2 * (2 * 500 * 1000 + 500 + 1000) + 10_000 + 4004)
    of_tensor, given = mesh(Mesh(tensor=2)).options, {"job": Masked()}
    assert f"worker: {mib(part)} of parameters, {mib(part)} of gradients" in checked(of_tensor, 2, **given)[1]
    errors, _ = checked(of_tensor, 2, limit=MemoryLimit(largest_bytes=2.1 * part), **given)
    assert errors[0].endswith("use strategy=fsdp with strategy.num_workers=4 or more")
    together = MemoryLimit(largest_bytes=7.9 * part, total_bytes=7.9 * part)
    errors, _ = checked(of_tensor, 2, limit=together, **given)
    assert errors[0].endswith("add memory, or use a smaller model")


def test_an_estimate_that_does_not_fit_is_only_warned_of() -> None:
    errors, notes = checked(DDP, 2, limit=MemoryLimit(largest_bytes=4 * WEIGHTS))
    assert errors == []
    assert "training is estimated to take" in notes
    assert "estimated" not in checked(DDP, 2, limit=MemoryLimit(largest_bytes=GIB))[1]


STATE = 3 * WEIGHTS
"""Parameters and the state of their optimizer."""


@pytest.mark.parametrize(
    ("name", "every", "on_node", "copies", "snapshots"),
    [
        ("ddp-4", 5, 4, 0, 1),
        ("fsdp-2", 0, 2, 0, 1),
        ("fsdp-2", 5, 2, 4, 1),
        ("fsdp-2", 5, 1, 4 / 2, 1 / 2),
        ("sharded-ddp-2", 5, 2, 4, 1),
        ("hsdp-2x2", 5, 4, 2 * 4, 1),
        ("hsdp-2x2", 5, 1, 4 / 2, 1 / 2),
        ("1F1B-2", 5, 2, 4, 1),
        ("1F1B-2", 11, 2, 2, 1),
    ],
)
def test_copies_in_host_memory_count_for_the_workers_of_a_node(
    name: str, every: int, on_node: int, copies: float, snapshots: float
) -> None:
    """Four parts for each worker, of which two are of a neighbour, and one part of each worker that saves."""
    layout = LAYOUTS[name]
    given: dict[str, Any] = {"device": "cuda", "node": NodeShare(workers=on_node), "peer_copy_every": every}
    errors, notes = checked(layout.options, layout.world_size, train=replace(TRAIN, steps=20), **given)
    assert errors == []
    assert f"up to {mib(snapshots * STATE)} of snapshots for checkpoints" in notes
    expected = f"{mib(copies * STATE)} of copies for recovery (recovery.peer_copy_every={every}), "
    assert (expected in notes) if copies else ("copies" not in notes)
    assert notes.endswith(f": {mib((copies + snapshots) * STATE)}")


@pytest.mark.parametrize(
    ("options", "device", "bytes_there", "is_only", "remedy", "refused"),
    [
        (FSDP, "cuda", 5 * STATE, True, None, False),
        (FSDP, "cuda", 4 * STATE, True, "set recovery.peer_copy_every=0, or raise checkpoint.every", False),
        (FSDP, "cuda", 4 * STATE - 1, True, "set recovery.peer_copy_every=0, or raise checkpoint.every", True),
        (FSDP, "cuda", STATE, False, "set recovery.peer_copy_every=0, or raise checkpoint.every", False),
        (FSDP, "cpu", 5 * STATE, True, "set recovery.peer_copy_every=0, or raise checkpoint.every", True),
        (replace(FSDP, cpu_offload=True), "cuda", STATE, True, "set strategy.cpu_offload=false", True),
        (DDP, "cuda", STATE - 1, True, "raise checkpoint.every", False),
    ],
)
def test_only_copies_that_cannot_fit_on_the_only_node_are_refused(
    options: StrategyConfig, device: str, bytes_there: float, is_only: bool, remedy: str | None, refused: bool
) -> None:
    node = NodeShare(workers=2, memory_bytes=bytes_there, is_only=is_only)
    errors, notes = checked(options, 2, device=device, node=node, peer_copy_every=1)
    told = [text for text in [*errors, *notes.split("; host ")] if "there are" in text]
    assert bool(errors) == refused
    assert len(told) == (remedy is not None)
    assert remedy is None or remedy in "".join([*errors, notes])
