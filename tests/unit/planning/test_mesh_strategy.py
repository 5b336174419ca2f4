"""``strategy=mesh``: which products make a mesh, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config.compose import compose
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Node, find_layout
from orchestrator.strategies import registry
from orchestrator.user_code.errors import ConfigError

NODES = (Node(node_id="here", name="here", cpus=8, gpus=0),)


def errors_of(**sizes: Any) -> list[str]:
    try:
        mesh_of(**sizes)
    except ConfigError as e:
        return [*e.errors]
    return []


def mesh_of(**sizes: Any) -> Mesh:
    errors: list[str] = []
    words = ["strategy=mesh", *(f"strategy.{name}={size}" for name, size in sizes.items())]
    config, _ = compose(words, errors, registry.config_class)
    if config is None:
        raise ConfigError(errors)
    return find_layout(config, registry.load("mesh"), NODES, oversubscribe_cpus=True).layout.mesh


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ({}, Mesh(replicate=2)),
        ({"replicate": 3}, Mesh(replicate=3)),
        ({"pipeline": 2, "num_workers": 4}, Mesh(pipeline=2, replicate=2)),
        ({"pipeline": 2, "shard": 2, "num_workers": 8}, Mesh(pipeline=2, replicate=2, shard=2)),
        ({"replicate": 2, "shard": "auto", "num_workers": 8}, Mesh(replicate=2, shard=4)),
        ({"replicate": 1, "pipeline": 2, "shard": 2}, Mesh(pipeline=2, shard=2, replicas_close=True)),
        ({"replicate": 2, "shard": 2, "shard_optimizer": "true"}, Mesh(replicate=2, shard=2)),
    ],
)
def test_the_sizes_make_a_mesh(sizes: dict[str, Any], mesh: Mesh) -> None:
    assert mesh_of(**sizes) == mesh


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        (
            {"pipeline": 2, "shard": 3, "num_workers": 8},
            "strategy.num_workers=8: strategy.pipeline=2 x strategy.shard=3 makes 6; set it to 6 or 12",
        ),
        (
            {"replicate": 2, "num_workers": 6},
            "strategy.num_workers=6: strategy.replicate=2 makes 2; set it to 2, or one size to auto",
        ),
        ({"shard": 0}, "strategy.shard=0: must be at least 1"),
        (
            {"shard": "auto"},
            "strategy.replicate=auto and strategy.shard=auto: one size follows from the others and "
            "strategy.num_workers; give a number for all but one",
        ),
        (
            {"expert": 2},
            "strategy.expert=2: this dimension comes with a later version; set it to 1, and use strategy.shard=2 to "
            "divide the model over as many workers",
        ),
        (
            {"shard_optimizer": "true"},
            "strategy.shard_optimizer=true: strategy.shard=1 divides nothing; set strategy.shard to the number of "
            "workers over which the optimizer's state is divided",
        ),
        (
            {"pipeline": 2, "shard": 2, "schedule": "ZBVZeroBubble"},
            "strategy.reshard_after_forward=true: ZBVZeroBubble computes the gradients of parameters in passes of "
            "their own, which gather nothing; set it to false, or use strategy.schedule=1F1B or Interleaved1F1B",
        ),
        (
            {"shard": 2, "num_workers": 4, "sync_batchnorm": "true"},
            "strategy.sync_batchnorm=true: only whole models on each worker have it; set it to false",
        ),
        (
            {"num_microbatches": 4},
            "strategy.num_microbatches=4: strategy.pipeline=1 has no stages; set it to auto",
        ),
        (
            {"tensor_pairs": "['up -> down']"},
            "strategy.tensor_pairs=[up -> down]: strategy.tensor=1 divides no layers; set it to auto",
        ),
        (
            {"sequence": "true"},
            "strategy.sequence=true: strategy.tensor=1 divides no layers; set it to false",
        ),
        (
            {"sequence": "true", "tensor": 2, "pipeline": 2},
            "strategy.sequence=true: the stages of a pipeline exchange all tokens; set it to false",
        ),
    ],
)
def test_other_sizes_are_refused_with_what_to_set(sizes: dict[str, Any], error: str) -> None:
    assert errors_of(**sizes) == [error]


@pytest.mark.parametrize("sizes", [{"replicate": "auto", "shard": 2}, {"replicate": 2, "shard": "auto"}])
def test_an_elastic_run_keeps_the_parts_if_it_has_replicas(sizes: dict[str, Any]) -> None:
    errors: list[str] = []
    words = ["strategy=mesh", "strategy.num_workers=4", *(f"strategy.{n}={s}" for n, s in sizes.items())]
    config, _ = compose(words, errors, registry.config_class)
    assert config is not None
    rules, largest = registry.load("mesh"), Mesh(replicate=2, shard=2)
    options = rules.resized(config.strategy, 2, mesh=largest, pipeline=None)
    assert options is not None
    found = find_layout(replace(config, strategy=options), rules, NODES, oversubscribe_cpus=True).layout.mesh
    assert found.has_parts_of(largest)


def test_a_dimension_of_another_strategy_is_a_key_of_mesh() -> None:
    errors: list[str] = []
    compose(["strategy=fsdp", "strategy.pipeline=2"], errors, registry.config_class)
    assert errors == ["strategy.pipeline: no such key in strategy=fsdp; it belongs to strategy=mesh"]
