"""The errors of predictions of published runs: they hold for unseen files, and must not grow."""

import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest

from orchestrator.config.build import ConfigError
from orchestrator.features.plan.prediction.calibration import (
    CASES,
    Case,
    Known,
    Spread,
    compare,
    has_published_runs,
    known_of,
    published,
    shares_of_job,
    spread,
    typical,
    usual,
)
from orchestrator.features.plan.prediction.devices import read_tables
from orchestrator.features.plan.prediction.published import (
    COLUMNS,
    PUBLISHED,
    Row,
    Run,
    Setup,
    as_run,
    published_runs,
    read_rows,
)
from orchestrator.features.plan.shown import published_json, published_table

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from spreads import measured

TABLES = read_tables()
ROWS = read_rows(PUBLISHED)


def of(software: str, *, sparse: bool = False) -> list[Run]:
    """The published runs of some setups, by the beginnings of their names."""
    return [run for run in published_runs() if str(run.setup).startswith(software) and run.is_sparse == sparse]


def renamed(runs: list[Run], marked: Callable[[int], bool] = lambda number: False) -> list[Row]:
    """Rows of them as of software that nobody has seen."""
    framework = '数 "Neu", 1'
    return [dict(run.row, framework=framework, known="1" if marked(n) else "") for n, run in enumerate(runs)]


def test_every_published_run_is_predicted_and_has_a_source() -> None:
    compared = compare(ROWS, TABLES)
    assert len(compared) == len(ROWS) == 377
    assert all(c.run.row["source"] for c in compared)
    assert sum(c.is_known for c in compared) < 26
    calibrated = [c for c in compared if not c.run.is_sparse and not c.is_known and c.shares.known]
    found = Spread.of([(c.run.setup, c.error) for c in calibrated])
    assert found.median <= 0.08
    assert found.ninth <= 0.23


@pytest.mark.parametrize(
    ("case", "sparse", "median", "ninth"),
    [
        ("calibrated", False, 0.09, 0.25),
        ("new device", False, 0.11, 0.23),
        ("new software", False, 0.17, 0.35),
        ("all new", False, 0.16, 0.30),
        ("calibrated", True, 0.15, 0.60),
        ("new device", True, 0.30, 0.70),
        ("all new", True, 0.40, 1.30),
    ],
)
def test_errors_by_what_is_known(case: Case, sparse: bool, median: float, ninth: float) -> None:
    found = spread(case, sparse=sparse)
    for figure, now in zip(astuple(found), astuple(measured(case, sparse=sparse)), strict=True):
        assert figure == pytest.approx(now, rel=1e-5), "python benchmarks/spreads.py writes the table anew"
    assert 0.8 * median < found.median <= median
    assert 0.8 * ninth < found.ninth <= ninth
    assert found.low < 1 < found.high
    assert found.setups >= 5


def test_a_run_that_is_left_out_changes_nothing() -> None:
    setup = Setup("llm-foundry", "BF16", "H100")

    def without(other: Setup) -> bool:
        return other.software == setup.software

    others = Known(run for run in published().runs if not without(run.setup))
    assert others.prior(setup) == published().prior(setup, without=without) != published().prior(setup)
    assert others.shares(setup).case == published().shares(setup, without=without).case == "new software"


def test_setups_count_the_same() -> None:
    few, many = Setup("a", "BF16", "H100"), Setup("b", "BF16", "H100")
    found = Spread.of([(few, 0.1), *[(many, 1.0)] * 99])
    assert (found.count, found.setups) == (100, 2)
    assert (found.median, found.ninth, found.worst) == (0.1, 1.0, 1.0)
    assert (found.low, found.high) == (0.5, pytest.approx(1 / 1.1))


def test_one_known_run_of_unseen_software_takes_most_of_its_bias_away() -> None:
    runs = of("llm-foundry BF16 H100")
    unseen = compare(renamed(runs[:1]), TABLES)[0]
    assert unseen.shares.case == "new software"
    marked = next(n for n, run in enumerate(runs) if (run.row["model"], run.devices) == ("MPT-7b", 8))
    compared = compare(renamed(runs, lambda number: number == marked), TABLES)
    assert [n for n, c in enumerate(compared) if c.is_known] == [marked]
    errors = Spread.of([(c.run.setup, c.error) for c in compared if not c.is_known])
    assert errors.median < spread("all new", sparse=False).median
    assert all(c.shares.known is compared[marked].run for c in compared if not c.is_known)
    assert published_json(compared)[0]["case"] == "calibrated"


def test_without_a_mark_the_run_on_one_node_that_is_most_like_the_others_is_known() -> None:
    runs = of("llm-foundry BF16 H100")
    compared = compare(renamed(runs), TABLES)
    (known,) = [c.run for c in compared if c.is_known]
    assert known.devices <= 8
    faster = [as_run(dict(run.row, tokens_s_gpu="1"), TABLES) for run in runs]
    assert typical(faster).row["model"] == known.row["model"], "what was measured plays no part"
    assert not known_of([known]), "a single run calibrates nothing"


def test_of_several_known_runs_the_most_similar_one_counts() -> None:
    runs = [run for run in of("llm-foundry BF16 H100") if run.row["model"] == "MPT-1b" and run.devices == 8]
    by_tokens = {run.work.tokens: run for run in runs}
    known = Known([by_tokens[512], by_tokens[32768]])
    nearest = {tokens: known.shares(run.setup, of=run).known for tokens, run in by_tokens.items()}
    assert nearest[1024] is by_tokens[512]
    assert nearest[16384] is nearest[512] is by_tokens[32768], "a run does not calibrate itself"


def test_with_experts_a_factor_counts_for_a_family_of_models_only() -> None:
    runs = of("Megatron FP8 H100", sparse=True)
    qwen = next(run for run in runs if run.row["model"].startswith("Qwen3_30B"))
    dense = of("Megatron FP8 H100")[-1]
    known = Known([qwen, dense])
    cases = {family: known.shares(qwen.setup, family).case for family in ("qwen3", "gpt", "")}
    assert cases == {"qwen3": "calibrated", "gpt": "all new", "": "calibrated"}
    assert known.shares(qwen.setup, "qwen3").stack.products < known.shares(qwen.setup).stack.products


def test_dispatch_to_experts_takes_time_in_every_precision() -> None:
    for run in of("Megatron BF16", sparse=True):
        assert usual(run.setup).dispatch_s > 0
        assert run.time(usual(run.setup)).expert > run.step.passes * usual(run.setup).dispatch_s


@pytest.mark.parametrize(
    ("device", "compiled", "case"),
    [("H200", False, "calibrated"), ("H200", True, "all new"), ("H100", False, "all new"), ("L40S", False, "all new")],
)
def test_a_job_of_this_program_is_all_new_but_where_it_has_run(device: str, compiled: bool, case: Case) -> None:
    found = shares_of_job(device, compiled=compiled, sparse=False)
    assert found.case == case
    assert shares_of_job(device, compiled=compiled, sparse=True).case == "all new"


def test_our_own_run_is_predicted_as_it_was_measured() -> None:
    (own,) = of("orchestrator")
    assert own.error(shares_of_job("H200", compiled=False, sparse=False).stack) == pytest.approx(0, abs=1e-3)


def test_devices_without_a_published_run() -> None:
    names = [name for name in TABLES.devices if not has_published_runs(name)]
    assert names == ["B300", "GB300", "L40S", "A10G", "RTX4090", "MI300X", "MI325X", "MI355X"]


def test_torchtitan_divides_a_batch_into_as_many_micro_batches_as_ranks_unless_it_is_told() -> None:
    row = next(row for row in ROWS if "1F1B" in row["options"] and row["mbs"] == "?")
    found = as_run(row, TABLES).step
    assert found.passes == found.mesh.pipeline == 8
    assert as_run(dict(row, mbs="1"), TABLES).step.passes == 32


@pytest.mark.parametrize(
    ("change", "device", "precision"),
    [
        ({"gpu": "NVIDIA H100 80GB HBM3"}, "H100", "BF16"),
        ({"gpu": "A100-80GB"}, "A100", "BF16"),
        ({"gpu": " H200 ", "precision": "bf16"}, "H200", "BF16"),
        ({"precision": "float8"}, "H100", "FP8"),
        ({"precision": "FP8-MX"}, "H100", "MXFP8"),
        ({"gpu": "GB300", "gpus": "144", "precision": "nvfp4"}, "GB300", "NVFP4"),
        ({"gpus": "20"}, "H100", "BF16"),
        ({"framework": ""}, "H100", "BF16"),
    ],
)
def test_names_of_other_files_are_understood(change: dict[str, str], device: str, precision: str) -> None:
    row = dict(of("llm-foundry BF16 H100")[-1].row, **change)
    run = as_run(row, TABLES)
    assert (run.setup.device, run.setup.precision) == (device, precision)
    assert run.cluster.devices >= run.devices
    table = published_table(compare([row], TABLES))
    assert all(case in table for case in CASES)


def test_a_file_without_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(",".join(c for c in COLUMNS if c not in ("gpu", "mbs")) + "\n")
    with pytest.raises(ConfigError, match="lacks the columns gpu, mbs"):
        read_rows(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "H10"}, r"row 1 \(GPT OSS 120B\) cannot be read: gpu=H10: unknown; did you mean H100\?"),
        ({"gpu": ""}, "gpu=: expected the name of a device"),
        ({"gpu": "H100 PCIe"}, "gpu=H100 PCIe: unknown"),
        ({"gpus": "many"}, r"row 1 \(GPT OSS 120B\) cannot be read: .*'many'"),
        ({"mbs": "0"}, "mbs=0: expected a number above 0"),
        ({"mbs": "nan"}, "mbs=nan: expected a number above 0"),
        ({"vp": "-2"}, "vp=-2: expected a number above 0"),
        ({"tokens_s_gpu": "inf"}, "tokens_s_gpu=inf: expected a number above 0"),
        ({"tokens_s_gpu": "", "tflops_gpu": ""}, "tflops_gpu=: expected a number above 0"),
        ({"precision": "FP32"}, "precision=FP32: expected products in 16, 8 or 4 bits"),
        ({"active": "0"}, "active=0: of experts=128, a token uses one at least"),
        ({"heads": "2"}, "heads=2: expected kv_heads=8 at least"),
        ({"tp": "128"}, "gpus=64: tp, pp and cp need more"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_refused(change: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compare([dict(ROWS[0], **change)], TABLES)
