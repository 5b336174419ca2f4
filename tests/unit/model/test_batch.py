"""Trees of tensors: what moves, what is cut, what is joined, and that every container keeps its type."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from helpers.files.golden import Golden
from orchestrator.compat.torch import pytree
from orchestrator.model.batch import (
    NotJoined,
    first_rows,
    has_row_per_sample,
    join,
    num_rows,
    split_batch,
    tensors_in,
    to_device,
)

CPU, META = torch.device("cpu"), torch.device("meta")


class Cache:
    """Opaque, as the caches of language models are."""

    def __init__(self) -> None:
        self.keys = torch.ones(4, 2)


class Pair(NamedTuple):
    a: Tensor
    b: Any


@dataclass
class Plain:
    logits: Tensor
    cache: Any = None


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.logits)


class Output(OrderedDict[str, Any]):
    """As Hugging Face's ``ModelOutput``: registered, with its content as attributes."""

    def __init__(self, **values: Any):
        super().__init__(**values)
        vars(self).update(values)


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Output(**dict(zip(keys, values, strict=True))),
)


class Attributes(dict[str, Any]):
    """Unregistered, with its content as attributes."""

    def __init__(self, *args: Any, **values: Any):
        super().__init__(*args, **values)
        self.__dict__ = self


class Positional(dict[str, Any]):
    """Cannot be built from a dict."""

    def __init__(self, logits: Tensor, rows: int):
        super().__init__(logits=logits)


def rows(n: int = 4) -> Tensor:
    return torch.arange(2.0 * n).view(n, 2)


TREES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t, None),
    "list": lambda t: [t, "text"],
    "namedtuple": lambda t: Pair(a=t, b=(t, 1)),
    "dict": lambda t: {"logits": t, "inner": {"x": [t]}},
    "OrderedDict": lambda t: OrderedDict(logits=t),
    "defaultdict": lambda t: defaultdict(list, logits=t),
    "UserDict": lambda t: UserDict(logits=t),
    "dataclass": lambda t: Plain(logits=t, cache={"x": t}),
    "frozen": lambda t: Frozen(t),
    "registered": lambda t: Output(logits=t, hidden_states=(t, t)),
    "attributes": lambda t: Attributes(logits=t),
}
each_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def same_kind(a: Any, b: Any) -> None:
    """The same types all the way down, as far as these trees go."""
    assert type(a) is type(b)
    if isinstance(a, dict | UserDict):
        assert list(a) == list(b)
        for key in a:
            same_kind(a[key], b[key])
            if hasattr(a, key):
                assert getattr(a, key) is a[key]
                assert getattr(b, key) is b[key]
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same_kind(x, y)
    elif isinstance(a, Plain | Frozen):
        same_kind(vars(a), vars(b))


@each_tree
def test_cutting_keeps_the_types(tree: Callable[[Tensor], Any]) -> None:
    whole = tree(rows())
    cut = first_rows(whole, 3)
    same_kind(cut, whole)
    assert all(torch.equal(t, u[:3]) for t, u in zip(tensors_in(cut), tensors_in(whole), strict=True))
    assert num_rows(cut) == 3
    assert all(len(t) == 4 for t in tensors_in(whole)), "the original is unchanged"


@each_tree
def test_moving_keeps_the_types(tree: Callable[[Tensor], Any]) -> None:
    whole = tree(rows())
    assert to_device(whole, CPU) is whole
    moved = to_device(whole, META)
    same_kind(moved, whole)
    assert tensors_in(moved)
    assert all(t.device == META for t in tensors_in(moved))


@each_tree
def test_joining_is_the_reverse_of_cutting(tree: Callable[[Tensor], Any]) -> None:
    joined = join([tree(rows()[:3]), tree(rows()[3:])], CPU)
    same_kind(joined, tree(rows()))
    for got, expected in zip(tensors_in(joined), tensors_in(tree(rows())), strict=True):
        assert torch.equal(got, expected)


def test_an_opaque_object_is_passed_on() -> None:
    cache = Cache()
    output = Plain(logits=rows(), cache=cache)
    assert first_rows(output, 2).cache is cache
    assert to_device(output, META).cache is cache
    only_opaque = Plain(logits=None, cache=cache)  # type: ignore[arg-type]
    assert first_rows(only_opaque, 2) is only_opaque


def test_mappings_that_cannot_be_built_become_dicts() -> None:
    assert type(first_rows(Positional(rows(), 4), 2)) is dict
    assert type(first_rows(MappingProxyType({"x": rows()}), 2)) is MappingProxyType


def test_scalars_are_not_cut_and_are_stacked() -> None:
    assert first_rows({"loss": torch.tensor(1.0)}, 2) == {"loss": torch.tensor(1.0)}
    joined = join([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}], CPU)
    assert joined["loss"].tolist() == [1.0, 2.0]


def test_what_each_replica_has_of_its_own_is_refused_when_used() -> None:
    joined = join([Plain(rows(), Cache()), Plain(rows(), Cache())], CPU)
    assert len(joined.logits) == 8
    assert isinstance(joined.cache, NotJoined)
    uses: list[Callable[[Any], Any]] = [lambda c: c.keys, lambda c: c[0], len, list, bool]
    for use in uses:
        with pytest.raises(ValueError, match=r"a Cache of each replica.*strategy=ddp"):
            use(joined.cache)
    assert repr(joined) == f"Plain(logits={joined.logits}, cache=<Cache of each replica>)"
    shared = Cache()
    assert join([(shared, 3, "a"), (shared, 3, "a")], CPU) == (shared, 3, "a")
    assert isinstance(join([3, 4], CPU), NotJoined)


def test_tensors_of_other_shapes_are_refused_when_they_are_used(golden: Golden) -> None:
    """Similarities of all samples of a replica to each other, as CLIP returns them."""
    joined = join([{"rows": torch.ones(2, 3), "pairs": torch.ones(n, n)} for n in (2, 1)], CPU)
    assert joined["rows"].shape == (4, 3)
    with golden.raises(ValueError):
        joined["pairs"].sum()


@pytest.mark.parametrize(
    "outputs",
    [
        [{"a": rows()}, {"b": rows()}],
        [(rows(), rows()), (rows(),)],
        [{"a": rows()}, {"a": None}],
        [Plain(rows()), Frozen(rows())],
        [UserDict(a=rows()), UserDict(b=rows())],
    ],
)
def test_outputs_that_differ_in_structure_are_refused(outputs: list[Any]) -> None:
    with pytest.raises(ValueError, match="cannot be joined"):
        join(outputs, CPU)


@pytest.mark.parametrize(
    ("output", "per_sample"),
    [
        (rows(), True),
        ({"logits": rows(), "hidden": (rows(), None)}, True),
        ({"logits": rows(), "loss": torch.tensor(1.0)}, False),
        ({"logits": rows(), "loss": torch.ones(1)}, False),
        (Plain(rows(), Cache()), False),
        (rows(5), False),
    ],
)
def test_whether_an_output_has_a_row_per_sample(output: Any, per_sample: bool) -> None:
    assert has_row_per_sample(output, 4) is per_sample


def test_a_batch_is_a_pair_or_a_mapping() -> None:
    assert split_batch((1, 2)) == split_batch([1, 2]) == (1, 2)
    for batch in ({"a": 1, "b": 2}, UserDict(a=1)):
        inputs, target = split_batch(batch)
        assert inputs is target is batch
    assert split_batch(None) == (None, None)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [((1, 2, 3), "a tuple of 3"), ([1], "a list of 1"), (torch.ones(2, 3), r"a tensor of shape \(2, 3\) .*"), (7, "7")],
)
def test_other_batches_are_refused(batch: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"the batch is {kind}: .*Job\.collate.*pairs \(input, target\) or dicts"):
        split_batch(batch)
