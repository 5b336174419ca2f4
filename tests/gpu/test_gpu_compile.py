"""``train.compile`` on a GPU: the losses of the plain model, by kernels that were made for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.layouts import LAYOUTS, Layout
from helpers.conformance.training import Steps, losses, train
from helpers.jobs.quick_jobs import digits
from helpers.ranks.gang import Gang, close_gangs
from orchestrator.compat.torch import watching_compilation

SECONDS = 200.0
"""For the compilers, which are called a few times."""
WHERE = {
    "single": LAYOUTS["single"],
    "ddp-2": Layout(options=replace(DDP, bucket_mb=25.0), world_size=2),
    "1F1B-2": LAYOUTS["1F1B-2"],
}


@pytest.fixture(scope="module", autouse=True)
def own_processes() -> Iterator[None]:
    """End the processes with this file, and the compiled code with them."""
    yield
    close_gangs()


def compiled(rank: int, case: Case, cache_dir: str) -> tuple[Steps, int]:
    """What the rank saw, and how often something was compiled there."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    compilations: list[bool] = []
    with watching_compilation(compilations.append, lambda: None):
        return train(rank, case), len(compilations)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", WHERE)
def test_a_compiled_model_has_the_losses_of_the_plain_one(
    gang: Gang, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """If it fails, compiled code computes other values, or something is compiled again at every step."""
    layout = WHERE[name]
    plain = layout.of(Case(job=digits(depth=3), train=having(steps=2, global_batch_size=32)))
    case = replace(plain, train=having(plain.train, compile=True))
    cache_dir = str(tmp_path_factory.getbasetemp() / "inductor")
    counted = gang.run(compiled, case, cache_dir, world_size=layout.world_size, timeout_s=SECONDS)
    assert all(compilations for _, compilations in counted)
    expected = gang.run(train, plain, world_size=layout.world_size)
    torch.testing.assert_close(losses([seen for seen, _ in counted]), losses(expected), rtol=1e-4, atol=0)
