"""The workers of a run on CPUs that does not say how many: the smallest mesh that its keys ask for."""

from typing import Any

import pytest

from helpers.conformance.cases import options_of
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies import registry

SMALLEST: list[tuple[str, dict[str, Any], Mesh]] = [
    ("single", {}, Mesh()),
    ("ddp", {}, Mesh(replicate=2)),
    ("ddp", {"tensor": 2}, Mesh(tensor=2)),
    ("ddp", {"tensor": 2, "shard_optimizer": True}, Mesh(shard=2, tensor=2)),
    ("ddp", {"shard_optimizer": True}, Mesh(shard=2)),
    ("fsdp", {}, Mesh(shard=2)),
    ("fsdp", {"tensor": 2}, Mesh(shard=2, tensor=2)),
    ("fsdp", {"context": 2}, Mesh(context=2)),
    ("fsdp", {"context": 2, "tensor": 2}, Mesh(context=2, tensor=2)),
    ("hsdp", {}, Mesh(replicate=2, shard=2)),
    ("hsdp", {"tensor": 2}, Mesh(replicate=2, shard=2, tensor=2)),
    ("model_parallel", {}, Mesh(pipeline=2)),
    ("pipeline", {}, Mesh(pipeline=2)),
    ("pipeline", {"tensor": 2}, Mesh(pipeline=2, tensor=2)),
    ("pipeline", {"context": 2}, Mesh(pipeline=2, context=2)),
    ("ddp_pipeline", {"pipeline_parallel_size": 2}, Mesh(replicate=2, pipeline=2)),
    ("fsdp_pipeline", {"pipeline_parallel_size": 2}, Mesh(pipeline=2, shard=2)),
    ("fsdp_pipeline", {"pipeline_parallel_size": 2, "context": 2}, Mesh(pipeline=2, context=2)),
    ("mesh", {}, Mesh(replicate=2)),
    ("mesh", {"pipeline": 2, "tensor": 2}, Mesh(pipeline=2, tensor=2)),
    ("mesh", {"pipeline": 2}, Mesh(pipeline=2)),
    ("mesh", {"tensor": 2}, Mesh(tensor=2)),
    ("mesh", {"shard": 3}, Mesh(shard=3)),
    ("mesh", {"context": 2, "tensor": 2}, Mesh(context=2, tensor=2)),
    ("mesh", {"replicate": 1, "shard": "auto", "pipeline": 2}, Mesh(pipeline=2, shard=2)),
    ("mesh", {"replicate": 3, "shard": 2}, Mesh(replicate=3, shard=2)),
]


@pytest.mark.parametrize(("name", "keys", "expected"), SMALLEST)
def test_on_cpus_a_run_has_the_smallest_mesh_that_is_asked_for(name: str, keys: dict[str, Any], expected: Mesh) -> None:
    rules, options = registry.load(name), options_of(name, **keys)
    workers = rules.default_num_workers(options, gpus=(), spares=0)
    options, _ = rules.on_nodes(options, workers, workers_per_node=(workers,))
    errors: list[str] = []
    found = rules.mesh(options, workers, errors)  # type: ignore[attr-defined]
    assert (errors, found.num_workers) == ([], expected.num_workers)
    assert [found.size(n) for n in ("replicate", "shard", "pipeline", "context", "tensor")] == [
        expected.size(n) for n in ("replicate", "shard", "pipeline", "context", "tensor")
    ]


@pytest.mark.parametrize(("name", "keys", "expected"), [row for row in SMALLEST if row[0] != "single"])
def test_on_gpus_it_has_all_of_them(name: str, keys: dict[str, Any], expected: Mesh) -> None:
    options = options_of(name, **keys)
    if name != "mesh" or "auto" in options.sizes.values():
        assert registry.load(name).default_num_workers(options, gpus=(24,), spares=0) == 24
