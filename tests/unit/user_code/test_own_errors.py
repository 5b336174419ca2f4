"""Errors of the code of the user: the line that is to blame, and whether another attempt would end in the same way."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from orchestrator.planning.faults import Fault
from orchestrator.user_code.own_errors import OwnError, own_error
from orchestrator.worker.control.control import inject_fault
from orchestrator.worker.data.data_loader import BatchReader, DataError, Loader, Loading, ReadFailure


def missing_key() -> Any:
    return {"a": 1}["label"]


def missing_attribute() -> Any:
    return missing_key.loss  # type: ignore[attr-defined]


def no_shape() -> Any:
    return torch.ones(2, 3) @ torch.ones(2, 3)


def no_broadcast() -> Any:
    return torch.ones(2) + torch.ones(3)


def no_view() -> Any:
    return torch.ones(4).view(3, 3)


def wrong_index() -> Any:
    return torch.nn.functional.embedding(torch.tensor([5]), torch.ones(2, 2))


def no_gradient() -> Any:
    torch.ones(1).backward()


def other_types() -> Any:
    return torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2, dtype=torch.float64))


def wrong_loss() -> Any:
    return torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.ones(3, dtype=torch.long))


def unfulfilled() -> Any:
    assert missing_key is None, "planned"


def divide() -> Any:
    return 1 / 0


def store_away() -> Any:
    raise OSError("the store is away")


def lost_connection() -> Any:
    raise ConnectionResetError("by the store")


def waits() -> Any:
    raise TimeoutError("30 s")


def of_the_device() -> Any:
    raise RuntimeError("CUDA error: unspecified launch failure")


def unknown() -> Any:
    raise RuntimeError("the service does not answer")


def half_a_file() -> Any:
    return json.loads('{"a":')


def wrapped() -> Any:
    try:
        store_away()
    except OSError as e:
        raise ValueError("no sample") from e


def in_the_handling() -> Any:
    try:
        lost_connection()
    except ConnectionError:
        return missing_key()


def of_an_interface() -> Any:
    raise NotImplementedError


AGAIN = (
    *(missing_key, missing_attribute, no_shape, no_broadcast, no_view, wrong_index, no_gradient, other_types),
    *(wrong_loss, unfulfilled, divide, of_an_interface),
)
MAY_PASS = (*(store_away, lost_connection, waits, of_the_device, unknown, half_a_file, wrapped, in_the_handling),)


def raised_by(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - whatever it is
        call()
    return raised.value


@pytest.mark.parametrize(("call", "comes_again"), [*((c, True) for c in AGAIN), *((c, False) for c in MAY_PASS)])
def test_an_error_of_the_code_comes_again_and_one_of_the_world_may_pass(
    call: Callable[[], Any], comes_again: bool
) -> None:
    own = own_error(raised_by(call))
    assert own.comes_again == comes_again


def test_the_line_is_named_and_the_frames_are_those_of_the_user() -> None:
    own = own_error(raised_by(lambda: no_shape()))
    line = no_shape.__code__.co_firstlineno + 1
    assert own.place == f"test_own_errors.py:{line}: return torch.ones(2, 3) @ torch.ones(2, 3)"
    assert own.frames.count("File ") == own.frames.count("test_own_errors.py") == 3
    assert pickle.loads(pickle.dumps(own)) == own


class Items:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return missing_key() if index == 2 else index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_dataset_has_its_line_also_out_of_a_loader_process(num_workers: int) -> None:
    loading = Loading(collate=None, num_workers=num_workers, pin_memory=False, timeout_s=60)
    loader = Loader(BatchReader(Items(), torch.tensor, "train"), loading, seed=0)  # type: ignore[arg-type]
    with pytest.raises(DataError) as raised:
        list(loader.read([(0, [0, 1]), (0, [2, 3])]))
    own = own_error(raised.value)
    assert own.place.endswith('return {"a": 1}["label"]')
    assert own.comes_again


def test_an_error_that_is_injected_is_not_of_the_user() -> None:
    error = raised_by(lambda: inject_fault([Fault(kind="raise", step=3, rank=0)], rank=0, phase="train", step=3))
    own = own_error(error)
    assert own is None or not own.comes_again
    assert own_error(RuntimeError("without a traceback")) is None
    assert isinstance(own_error(ReadFailure("text", own_error=OwnError("a", "b", True)).error()), OwnError)
