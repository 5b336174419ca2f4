"""What ``strategy=auto`` measures on its workers."""

import json
from typing import Any
from unittest.mock import patch

import pytest

from helpers.conformance.cases import CLUSTER, TRAIN, options_of
from helpers.jobs.normed_job import Normed
from helpers.ranks.gang import Gang
from jobs.digits import Digits
from jobs.names import Names
from orchestrator.config.build import build
from orchestrator.tuning.profile import NO_COST, Profile

EVERY_KIND = ("parameter_server", "dp", "pipeline", "fsdp")


def measured(rank: int, job: Any, world_size: int, batch: int, candidates: tuple[Any, ...] = EVERY_KIND) -> Any:
    """The profile as a checkpoint has it; None on all ranks but the first."""
    import dataclasses

    import torch

    from orchestrator.planning.mesh import Mesh
    from orchestrator.strategies.measure import device
    from orchestrator.strategies.rank_context import Context
    from orchestrator.strategies.tuned import passes
    from orchestrator.strategies.tuned.auto import PROFILE_KEY, Auto

    options = options_of(
        "auto",
        num_workers=world_size,
        candidates=candidates,
        schedules=("1F1B",),
        measured=0,
        measured_steps=1,
        profile="fresh",
    )
    auto = Auto(
        Context(
            mesh=Mesh(replicate=world_size),
            global_rank=rank,
            device=torch.device("cpu"),
            seed=0,
            train=dataclasses.replace(TRAIN, global_batch_size=batch),
            options=options,
            collective_timeout_s=CLUSTER.collective_timeout_s,
        ),
        job,
    )
    auto.setup(job.dataset("train"))
    auto.attach()
    with patch.object(device, "MEASURED_S", 0.03), patch.object(passes, "TOGETHER_S", 0.05):
        for _ in range(3):
            auto.train_step([], want_grad_norm=False, want_metrics=False)
    state = auto.capture(step=3, samples_consumed=3 * batch, into=None)
    auto.close()
    return None if state is None else json.dumps(state.meta[PROFILE_KEY])


def profile_of(texts: list[Any]) -> Profile:
    errors: list[str] = []
    profile = build(Profile, json.loads(texts[0]), "", errors)
    assert profile is not None, errors
    assert not any(texts[1:])
    return profile


@pytest.mark.campaign  # ``test_auto_runs.py`` measures two workers too
def test_two_workers_measure_passes_alone_and_at_once_but_no_batch_too_small_for_the_model(gang: Gang) -> None:
    """BatchNorm refuses to train with one sample."""
    profile = profile_of(gang.run(measured, Normed(), 2, 8, world_size=2))
    assert {(c.busy, c.rows) for c in profile.passes} == {(busy, rows) for busy in (1, 2) for rows in (2, 4, 8)}
    assert all(c.pass_ms + c.update_ms > 0 for c in profile.passes)
    (division,) = profile.divisions
    assert division.num_stages == 2
    assert sum(layer.parameter_bytes for layer in division.layers) == profile.parameter_bytes
    assert profile.gradient_bytes == profile.parameter_bytes
    (group,) = profile.groups
    assert group.workers == 2
    assert NO_COST not in (group.all_reduce, group.all_gather, group.reduce_scatter)
    assert sum(profile.bytes_by_group) == profile.parameter_bytes
    assert min(profile.base_ms, profile.data.at(8)) > 0
    assert NO_COST not in (profile.server, profile.pipeline, profile.interleaved)
    assert profile.devices_ms
    assert profile.ddp_ms
    assert profile.parts_ms


def test_what_no_candidate_needs_is_not_measured(gang: Gang) -> None:
    profile = profile_of(gang.run(measured, Digits(hidden=8), 2, 8, ("ddp",), world_size=2))
    assert profile.groups
    assert {profile.server, profile.pipeline, profile.interleaved} == {NO_COST}
    assert (profile.devices_ms, profile.parts_ms) == (None, 0.0)


def test_one_worker_measures_a_model_that_cannot_be_cut(gang: Gang) -> None:
    profile = profile_of(gang.run(measured, Names(width=8), 1, 8, world_size=1))
    assert profile.passes
    assert not profile.groups
    assert profile.server == NO_COST
    assert profile.optimizer_bytes > 1, "Adam keeps two averages of each parameter"


def moved_by_measuring(rank: int) -> list[float]:
    """How far each model that is measured moves from its first weights."""
    import copy

    import torch
    from torch import nn

    built: list[tuple[nn.Module, nn.Module]] = []

    class Recorded(Digits):
        def model(self) -> nn.Module:
            model = super().model()
            built.append((model, copy.deepcopy(model)))
            return model

    measured(rank, Recorded(hidden=16), 1, 8)
    return [
        max(
            float((after - before).abs().max())
            for after, before in zip(now.parameters(), first.parameters(), strict=True)
        )
        for now, first in built
        if all(type(p) is nn.Parameter and p.device == torch.device("cpu") for p in now.parameters())
    ]


def test_a_model_is_measured_with_its_first_weights(gang: Gang) -> None:
    """Those that fit the batch would have denormal gradients, which are slow to compute."""
    (moved,) = gang.run(moved_by_measuring, world_size=1)
    assert moved
    assert set(moved) == {0.0}
