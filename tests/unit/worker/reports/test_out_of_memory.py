"""The message of a GPU that runs out of memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.conformance.cases import TRAIN
from helpers.files.golden import Golden
from orchestrator.strategies.measure.device import TensorSize, sizes_of
from orchestrator.worker.failures import explain_out_of_memory, is_out_of_memory

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 8.61 GiB is "
    "free. Process 1234 has 70.50 GiB memory in use. Of the allocated memory 60.00 GiB is allocated by PyTorch, and "
    "9.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
TENSORS = [
    TensorSize("head.weight", "parameter", 3 * 2**30, "cuda"),
    TensorSize("head.weight", "gradient", 3 * 2**30, "cuda"),
    TensorSize("head.weight", "optimizer state", 6 * 2**30, "cuda"),
    *[TensorSize(f"layer{i}.bias", "parameter", 1024, "cuda") for i in range(9)],
]


def message(error: str = OUT_OF_MEMORY, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "tensors": TENSORS,
        "gathered_bytes": 0.0,
        "train": TRAIN,
        "is_divided": False,
        "has_training_step": False,
    }
    return explain_out_of_memory(error, **(arguments | changes))


def test_the_message_says_what_takes_the_memory_and_what_to_change(golden: Golden) -> None:
    assert "about 48.00 GiB of activations; about 1.00 GiB of communicators" in message()
    golden.says(message())


@pytest.mark.parametrize(
    ("gathered_gib", "said"),
    [
        (2, "about 2.00 GiB of gathered blocks; about 46.00 GiB of activations; about 1.00 GiB of communicators "),
        (99, "6.00 GiB; about 48.00 GiB of gathered blocks; about 1.00 GiB of communicators "),
    ],
)
def test_gathered_blocks_and_communicators_are_no_activations(gathered_gib: int, said: str) -> None:
    assert said in message(gathered_bytes=gathered_gib * 2**30, is_divided=True)


def test_other_processes_on_the_gpu_are_no_communicators() -> None:
    several = OUT_OF_MEMORY.replace(
        "Process 1234 has 70.50 GiB memory in use.",
        "Process 7 has 0.75 GiB memory in use. Including non-PyTorch memory, this process has 69.75 GiB memory in use.",
    )
    assert "about 256.00 MiB of communicators" in message(several)
    assert "communicators" not in message(OUT_OF_MEMORY.replace("8.61 GiB is free", "9.61 GiB is free"))


def test_only_keys_that_help_are_named() -> None:
    train = replace(TRAIN, activation_checkpointing="blocks", precision="bf16", grad_accumulation=4)
    advice = message(train=train, is_divided=True).partition("To need less memory: ")[2]
    assert advice == "raise train.grad_accumulation=4, or lower train.global_batch_size=64"
    advice = message(train=train, has_training_step=True).partition("To need less memory: ")[2]
    assert advice == "lower train.global_batch_size=64", "the job makes its own updates"


def test_memory_in_pieces_is_recognised() -> None:
    assert "expandable_segments" not in message()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in message(OUT_OF_MEMORY.replace("20.00 GiB", "512.00 MiB"))


def test_a_host_that_has_no_memory_is_told_of_like_a_gpu() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    tensors = [*TENSORS, TensorSize("body.weight", "parameter", 2**30, "cpu")]
    assert message(str(raised.value), tensors=tensors).startswith(
        "CPU out of memory: tried to allocate 1073741824.00 GiB; training state: parameters 1.00 GiB; largest"
    )
    assert message(tensors=tensors) == message(), "what is in host memory takes none of the GPU"
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("tensors", [[], TENSORS])
def test_an_error_without_figures_is_shown_as_it_is(tensors: list[TensorSize]) -> None:
    text = message("CUDA out of memory in a library.", tensors=tensors)
    assert text.startswith("CUDA out of memory in a library")
    assert ("training state" in text) == bool(tensors)


def test_the_training_state_is_measured_by_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    before = {(t.name, t.kind): t.size_bytes for t in sizes_of(model, optimizer)}
    assert before["0.weight", "parameter"] == 32
    assert before["1.running_mean", "buffer"] == 8
    assert not any(kind in ("gradient", "optimizer state") for _, kind in before)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    after = {(t.name, t.kind): t.size_bytes for t in sizes_of(model, optimizer)}
    assert after["0.weight", "gradient"] == 32
    assert after["0.weight", "optimizer state"] == 2 * 32 + 4, "two moments and the step"
