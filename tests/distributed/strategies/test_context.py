"""Samples divided over workers by tokens: trained as by one worker alone, and saved and loaded by any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import CONTEXT, SGD, assert_as_alone
from helpers.conformance.training import train
from helpers.jobs.quick_jobs import TinyGPT
from helpers.ranks.gang import Gang

JOB = TinyGPT(layers=2, variant="llama", kv_heads=2, tied=True)
TRAIN = having(steps=6, clip_norm=0.5, grad_accumulation=2, global_batch_size=8, ema_decay=0.8)
CASES = {
    "llama": Case(job=JOB, train=TRAIN),
    "gpt2": Case(job=TinyGPT(layers=2), train=TRAIN),
    "documents": Case(job=replace(JOB, end_token=32), train=TRAIN),
}


@pytest.mark.parametrize("layout", CONTEXT)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_norms_and_weights_are_those_of_one_worker(gang: Gang, layout: str, case: Case) -> None:
    ranks = assert_as_alone(gang, case, CONTEXT[layout], want_grad_norm=True)[CONTEXT[layout]]
    (alone,) = gang.run(train, case, True, world_size=1)
    for rank in ranks:
        torch.testing.assert_close(rank.norms, alone.norms, rtol=SGD, atol=0)
