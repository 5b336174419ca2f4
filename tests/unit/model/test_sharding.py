"""How parameters are cut over servers: by bytes, in order, nothing twice and nothing left out."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from helpers.files.golden import Golden
from orchestrator.model.parameter_division import (
    ALIGNMENT_BYTES,
    ELEMENT_WISE,
    Extent,
    Shard,
    cut,
    extents_of,
    offsets,
    optimizer_error,
)


def numbers(name: str, units: int) -> Extent:
    return Extent(name=name, units=units, unit_bytes=4)


def table(name: str, rows: int, row_bytes: int) -> Extent:
    return Extent(name=name, units=rows, unit_bytes=row_bytes, by_rows=True)


MODELS: dict[str, list[Extent]] = {
    "one": [numbers("a", 100)],
    "several": [numbers("a", 7), numbers("b", 1000), numbers("c", 1), numbers("d", 64)],
    "tables": [table("t", 50, 400), numbers("a", 30), table("u", 3, 4000)],
    "nothing in one": [numbers("a", 0), numbers("b", 9), numbers("c", 0), numbers("d", 9), numbers("e", 0)],
    "as few as servers": [numbers("a", 3), table("t", 2, 4000)],
}


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
@pytest.mark.parametrize("extents", MODELS.values(), ids=MODELS)
def test_shards_follow_each_other_and_make_up_the_whole(extents: list[Extent], num_servers: int) -> None:
    servers = cut(extents, num_servers)
    assert len(servers) == num_servers
    assert all(servers)
    units = [(p.name, unit) for shards in servers for p in shards for unit in range(p.start, p.stop)]
    assert units == [(e.name, unit) for e in extents for unit in range(e.units)]
    assert all(len({p.name for p in shards}) == len(shards) for shards in servers)


@pytest.mark.parametrize("num_servers", [2, 3, 7])
def test_servers_are_of_one_size_but_for_a_unit(num_servers: int) -> None:
    extents = [numbers("a", 10_000), table("t", 300, 40), numbers("b", 17), numbers("c", 5_000)]
    unit_bytes = {e.name: e.unit_bytes for e in extents}
    sizes = [sum((p.stop - p.start) * unit_bytes[p.name] for p in shards) for shards in cut(extents, num_servers)]
    assert max(sizes) - min(sizes) <= 40


def test_a_large_tensor_is_split() -> None:
    servers = cut([numbers("small", 10), numbers("large", 990)], 2)
    assert servers == (
        (Shard(name="small", start=0, stop=10), Shard(name="large", start=0, stop=490)),
        (Shard(name="large", start=490, stop=990),),
    )


def test_more_servers_than_numbers(golden: Golden) -> None:
    with golden.raises(ValueError):
        cut([numbers("a", 2), table("t", 1, 40)], 4)


def test_parameters_lie_one_after_another_and_tables_elsewhere() -> None:
    extents = [numbers("a", 3), table("t", 5, 8), numbers("b", 4), numbers("c", 1)]
    found = offsets(extents)
    assert list(found) == ["a", "b", "c"]
    assert all(start % ALIGNMENT_BYTES == 0 for start in found.values())
    sizes = {e.name: e.size_bytes for e in extents}
    for before, after in itertools.pairwise(found):
        assert found[before] + sizes[before] <= found[after]


def test_what_is_trained_is_cut_and_sparse_tables_by_rows() -> None:
    model = nn.ModuleDict({
        "sparse": nn.EmbeddingBag(6, 5, sparse=True),
        "dense": nn.Embedding(6, 5),
        "linear": nn.Linear(2, 3),
        "frozen": nn.Linear(2, 3).requires_grad_(False),
    })  # fmt: skip
    assert extents_of(model) == (
        Extent(name="sparse.weight", units=6, unit_bytes=20, by_rows=True),
        Extent(name="dense.weight", units=30, unit_bytes=4),
        Extent(name="linear.weight", units=6, unit_bytes=4),
        Extent(name="linear.bias", units=3, unit_bytes=4),
    )


@pytest.mark.parametrize("kind", sorted(ELEMENT_WISE, key=lambda k: k.__name__))
def test_parts_are_updated_as_the_whole_is(kind: type[torch.optim.Optimizer]) -> None:
    random = torch.Generator().manual_seed(0)
    start = torch.randn(60, generator=random)
    gradients = [torch.randn(60, generator=random) for _ in range(4)]

    def trained(pieces: Sequence[slice]) -> torch.Tensor:
        parameters = [nn.Parameter(start[piece].clone()) for piece in pieces]
        optimizer = kind(parameters, lr=0.1)
        for gradient in gradients:
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = gradient[piece].clone()
            optimizer.step()
        return torch.cat([p.detach() for p in parameters])

    assert optimizer_error(kind([nn.Parameter(start)], lr=0.1)) is None
    torch.testing.assert_close(trained([slice(0, 13), slice(13, 60)]), trained([slice(0, 60)]), rtol=1e-6, atol=1e-7)


def test_an_optimizer_that_sees_whole_parameters_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(3, 3))]
    for optimizer in (torch.optim.LBFGS(parameters), torch.optim.Adafactor(parameters)):
        error = optimizer_error(optimizer)
        assert error.startswith(type(optimizer).__name__)
        assert "strategy=ddp" in error
