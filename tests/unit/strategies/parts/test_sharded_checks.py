"""What ``fsdp`` refuses before anything starts, and what it says of memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helpers.conformance import cases
from helpers.conformance.cases import Case
from helpers.conformance.layouts import FSDP, PARAMETER_SERVER, SHARDED_DDP
from helpers.files.golden import Golden
from helpers.jobs.toys import Toy
from orchestrator.config.schema import StrategyConfig
from orchestrator.planning.placement import Box
from orchestrator.strategies.update.job_optimizer import ELEMENTWISE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(10, 10), nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).tanh())


def blocks() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(10, 4))


def sparse() -> nn.Module:
    model = blocks()
    model[0].table = nn.Embedding(4, 10, sparse=True)
    return model


def hooked() -> nn.Module:
    model = blocks()
    model[2].bias.register_hook(lambda gradient: 2 * gradient)
    return model


def partly_complex() -> nn.Module:
    model = blocks()
    model[1].filter = nn.Parameter(torch.ones(6, dtype=torch.complex64))
    return model


def scripted() -> nn.Module:
    model = blocks()
    model[1] = torch.jit.script(model[1])  # type: ignore[no-untyped-call]
    return model


def listed() -> nn.Module:
    model = blocks()
    model[1].decayed = [model[1].layer.weight]
    return model


def sparse_buffer() -> nn.Module:
    model = blocks()
    model[1].register_buffer("adjacency", torch.eye(10).to_sparse_csr())
    return model


@dataclass(frozen=True, kw_only=True)
class Built(Toy):
    build: Callable[[], nn.Module] = blocks
    optimizer_of: Callable[[Any], Optimizer] = torch.optim.AdamW


def checked(job: Built, options: StrategyConfig = FSDP, *, workers: int = 2, **planned: Any) -> Any:
    return cases.checked(Case(job=job, options=options), workers, **planned)


def test_the_memory_of_a_worker() -> None:
    errors, notes = checked(Built(), workers=3)
    assert errors == []
    # Rows 4 of 10 on the first of three workers, 2 of 4 in the head; AdamW keeps two tensors for each.
    elements = 2 * (4 * 10 + 4 + 4 + 4) + 2 * 10 + 2
    assert f"{4 * elements / 2**20:.3g} MiB of parameters, {4 * elements / 2**20:.3g} MiB of gradients" in notes[-1]
    assert f"{8 * elements / 2**20:.3g} MiB of optimizer state" in notes[-1]
    # Two blocks and the head at once, and the gradients of a block.
    assert f"{4 * (3 * 130 + 44) / 2**20:.3g} MiB gathered from other workers" in notes[-1]
    assert "in float32" in notes[-1]


def test_blocks_that_are_larger_than_the_part_of_a_worker_are_said(golden: Golden) -> None:
    assert not any("strategy.wrap" in note for note in checked(Built(), workers=2)[1])
    [note, _] = checked(Built(), workers=3)[1]
    golden.says(note)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (sparse, "gradients of 0.table.weight are sparse"),
        (hooked, "the gradient hooks of 2.bias would not be called"),
        (partly_complex, "1.filter is complex and 1.layer.weight is not"),
        (scripted, "1, 1.layer, and 1 more is in TorchScript"),
        (listed, "1.decayed[0] is a parameter in a plain attribute"),
        (sparse_buffer, "1.adjacency is sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(torch.jit.script|Sparse CSR).*")
def test_parameters_that_cannot_be_divided_are_named(build: Callable[[], nn.Module], said: str) -> None:
    [error], _ = checked(Built(build=build))
    assert error.startswith(("strategy=fsdp: ", "job.model: "))
    assert said in error


def hooked_sgd(parameters: Any, lr: float) -> Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def sgd_with_own_step(parameters: Any, lr: float) -> Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment, misc]
    return optimizer


@pytest.mark.parametrize("kind", [hooked_sgd, sgd_with_own_step])
@pytest.mark.parametrize(
    "options",
    [FSDP, SHARDED_DDP, pytest.param(PARAMETER_SERVER, marks=pytest.mark.needs("asynchronous"))],
    ids=lambda options: options.name,
)
def test_a_changed_step_is_refused(options: StrategyConfig, kind: Callable[..., Optimizer], golden: Golden) -> None:
    [error], _ = checked(Built(optimizer_of=partial(kind, lr=0.01)), options, workers=4)
    golden.says(error)


def test_offloading_is_for_gpus_and_leaves_them_what_is_gathered(golden: Golden) -> None:
    [error], _ = checked(Built(), replace(FSDP, cpu_offload=True))
    golden.says(error)
    errors, notes = checked(Built(), replace(FSDP, cpu_offload=True), device="cuda")
    assert errors == []
    gathered = f"{4 * (3 * 130 + 44) / 2**20:.3g} MiB"
    on_gpu = f"on its GPU, {gathered} gathered from other workers: {gathered}; "
    assert f"of optimizer state in host memory; {on_gpu}" in notes[-1]


def test_each_module_that_is_gathered_ahead_takes_memory() -> None:
    job = Built(build=lambda: nn.Sequential(*(Block() for _ in range(4)), nn.Linear(10, 4)))
    _, notes = checked(job, replace(FSDP, prefetch=2))
    assert f"{4 * (4 * 130 + 44) / 2**20:.3g} MiB gathered from other workers" in notes[-1]


def test_a_class_that_the_model_lacks_is_refused(golden: Golden) -> None:
    [error], _ = checked(Built(), replace(FSDP, wrap=("Blok",)))
    golden.says(error)


def test_a_model_without_blocks_is_said_to_be_gathered_at_once(golden: Golden) -> None:
    errors, notes = checked(Built(build=lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))))
    assert errors == []
    golden.says(notes[0])


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_parts_that_are_updated_alone_are_parts_of_the_updated_tensor(kind: type[Optimizer]) -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(5, 3))
    boxes = [Box.shard(whole.shape, index, 3) for index in range(3)]
    parts = [nn.Parameter(whole.detach()[box.slices_in(Box.whole(whole.shape))].clone()) for box in boxes]
    optimizers = [kind([tensor], lr=0.1) for tensor in (whole, *parts)]
    for _ in range(4):
        whole.grad = torch.randn(5, 3)
        for part, box in zip(parts, boxes, strict=True):
            part.grad = whole.grad[box.slices_in(Box.whole(whole.shape))].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole.detach())
