"""``strategy=mesh``: which products make a mesh, and what is said of the others."""

from dataclasses import replace
from typing import Any

import pytest

from helpers.files.golden import Golden
from orchestrator.config.compose import compose
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Node, find_layout
from orchestrator.strategies import registry
from orchestrator.user_code.errors import ConfigError

NODES = (Node(node_id="here", name="here", cpus=8, gpus=0),)


def mesh_of(*words: str) -> Mesh:
    errors: list[str] = []
    config, _ = compose(["strategy=mesh", *words], errors, registry.config_class)
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
    assert mesh_of(*(f"strategy.{name}={size}" for name, size in sizes.items())) == mesh


def test_other_sizes_are_refused_with_what_to_set(golden: Golden) -> None:
    def error(*words: str) -> str:
        with pytest.raises(ConfigError) as refused:
            mesh_of(*words)
        return "\n".join(refused.value.errors)

    golden.answers("errors/mesh", error)


@pytest.mark.parametrize("sizes", [{"replicate": "auto", "shard": 2}, {"replicate": 2, "shard": "auto"}])
def test_an_elastic_run_keeps_the_parts_if_it_has_replicas(sizes: dict[str, Any]) -> None:
    errors: list[str] = []
    words = ["strategy=mesh", "strategy.num_workers=4", *(f"strategy.{n}={s}" for n, s in sizes.items())]
    config, _ = compose(words, errors, registry.config_class)
    rules, largest = registry.load("mesh"), Mesh(replicate=2, shard=2)
    options = rules.resized(config.strategy, 2, mesh=largest, pipeline=None)
    assert options is not None
    found = find_layout(replace(config, strategy=options), rules, NODES, oversubscribe_cpus=True).layout.mesh
    assert found.has_parts_of(largest)
