"""``train.detect_anomaly``: NaN in a backward pass ends the run at the line of the forward pass that it belongs to."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.conformance.cases import Case, assignment, having
from helpers.conformance.layouts import EVERY
from helpers.conformance.training import CPU, default_store
from helpers.jobs.toys import Toy
from helpers.ranks.loops import loop_of
from orchestrator.protocol.messages import Failure
from orchestrator.strategies import registry
from orchestrator.user_code.callbacks import current_step
from orchestrator.worker.anomalies import AnomalyError, detecting_anomalies
from orchestrator.worker.control.rendezvous import context_of
from orchestrator.worker.failures import describe_failure

TRAIN = having(steps=6, global_batch_size=16, detect_anomaly=True, check="never")


@dataclass(frozen=True, kw_only=True)
class Rooted(Toy):
    """Without a fault in the forward pass."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        warnings.warn("the user's own", stacklevel=1)
        loss = super().loss(output, target)
        return loss + rooted(output * (current_step() < 3)).sum() * 1e-3


def rooted(values: Tensor) -> Tensor:
    return values.abs().sqrt()  # whose gradient at 0 is infinite


def failure_of_rank(rank: int, case: Case, world_size: int, run_dir: str) -> Failure:
    Path(run_dir, "checkpoints").mkdir(parents=True, exist_ok=True)
    orders = assignment(rank=rank, world_size=world_size, generation=1, store_port=0, run_dir=run_dir, case=case)
    strategy = registry.load(case.options.name).create(context_of(orders, CPU), case.job)
    loop = loop_of(orders, case, strategy)
    try:
        loop.run({}, store=default_store())
    except Exception as e:
        assert not torch.is_anomaly_enabled()
        return describe_failure(e, orders, loop, Path(run_dir, "log"), after_abort=False)
    finally:
        strategy.close()
        loop.finish(timeout_s=60)
    raise AssertionError("trained")


@pytest.mark.parametrize("layout", ["single", "ddp-2", "fsdp-2", "dp-2", "hogwild-2"])
def test_the_failure_has_the_line_of_the_forward_pass(gang, tmp_path: Path, layout: str) -> None:
    case, world_size = EVERY[layout].of(Case(job=Rooted(), train=TRAIN)), EVERY[layout].world_size
    for failure in gang.run(failure_of_rank, case, world_size, str(tmp_path), world_size=world_size):
        first = failure.message.splitlines()[0]
        place = r"test_anomalies\.py:\d+: return values\.abs\(\)\.sqrt\(\)  # whose gradient at 0 is infinite"
        assert re.search(rf"AbsBackward0 returned NaN in the backward pass \({place}\)$", first)
        assert "in rooted" in failure.own_frames
        assert "in loss" in failure.own_frames
        assert failure.final
        assert not failure.collateral


def test_other_errors_and_warnings_pass() -> None:
    def no_scalar() -> None:
        with detecting_anomalies():
            warnings.warn("own", stacklevel=1)
            torch.ones(2, requires_grad=True).backward()

    with pytest.warns(UserWarning, match="own"), pytest.raises(RuntimeError, match="scalar outputs"):
        no_scalar()
    with pytest.raises(AnomalyError) as raised, detecting_anomalies():
        torch.zeros(1, requires_grad=True).abs().sqrt().mul(0).backward()
    assert raised.value.own_error is not None
    assert raised.value.own_error.place.endswith(".mul(0).backward()")
