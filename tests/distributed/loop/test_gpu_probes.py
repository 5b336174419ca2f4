"""The probe of recoveries that `benchmarks/gpu_quarter.py` makes on a GPU, here with gloo."""

import sys

import pytest

from helpers.records.runs import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from gpu_probes.probe import ProbeError
from gpu_probes.rank import Ended
from gpu_probes.recovery import recoveries, refuse_unless


@pytest.mark.campaign
@pytest.mark.timeout(240)
def test_a_rank_survives_the_error_and_the_death_of_another_with_its_weights() -> None:
    found = recoveries(communicators=2, kills=1, fails=True, on_cpu=True)
    for part in ("the failed rank says IndexError", "with exact weights", "30 steps more"):
        assert part in found


@pytest.mark.parametrize("end", [Ended(step=3, error=None, exact=False), Ended(step=3, error="CUDA", exact=True)])
def test_wrong_weights_and_an_error_in_the_end_fail_the_probe(end: Ended) -> None:
    with pytest.raises(ProbeError, match="at step 3"):
        refuse_unless(end, failed=False)
