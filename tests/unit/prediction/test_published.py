"""The errors of predictions of published runs, which must not grow."""

from pathlib import Path

import pytest

from orchestrator.config.build import ConfigError
from orchestrator.display.forecasts import published_table
from orchestrator.prediction.devices import read_tables
from orchestrator.prediction.forecast import like
from orchestrator.prediction.published import (
    CALIBRATIONS,
    COLUMNS,
    LARGE,
    PUBLISHED,
    Compared,
    Spread,
    calibrated,
    compare,
    known_stack,
    other_stack,
    published_runs,
    read_rows,
    stack_name,
)


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return compare(read_rows(PUBLISHED), read_tables())


def test_every_published_run_is_predicted(compared: list[Compared]) -> None:
    assert len(compared) == len(read_rows(PUBLISHED)) == 361
    assert all(c.run.row["source"] for c in compared)


def test_errors_of_dense_models(compared: list[Compared]) -> None:
    spread = Spread.of([c for c in compared if not c.run.is_sparse])
    assert spread.count > 280
    assert spread.median <= 0.06
    assert spread.mean <= 0.08
    assert spread.ninth <= 0.17


def test_errors_on_many_devices(compared: list[Compared]) -> None:
    spread = Spread.of([c for c in compared if c.run.devices >= LARGE])
    assert spread.count > 80
    assert spread.median <= 0.09


def test_errors_of_models_with_experts(compared: list[Compared]) -> None:
    spread = Spread.of([c for c in compared if c.run.is_sparse])
    assert spread.count > 45
    assert spread.median <= 0.30


def test_a_stack_is_tuned_on_three_rows_at_most_each_on_its_own(compared: list[Compared]) -> None:
    for name in {stack_name(run.row) for run in published_runs()}:
        assert name in CALIBRATIONS
        stack, tuned_on = calibrated(name, published_runs())
        assert 0.2 < stack.products < 0.8
        dense = [run for run in tuned_on if not run.is_sparse]
        assert len(dense) <= 2
        assert all(run.devices <= run.cluster.domain for run in dense)  # a node, or a rack that is joined like one
        assert len(tuned_on) - len(dense) <= 1
    assert sum(c.tuned for c in compared) <= 20


def test_predictions_that_a_share_was_taken_from_do_not_count(compared: list[Compared]) -> None:
    tuned = [c for c in compared if c.tuned]
    assert tuned
    assert Spread.of([*tuned, compared[0]]).count == (not compared[0].tuned)


def test_the_spread_of_a_prediction_comes_from_runs_like_it(compared: list[Compared]) -> None:
    few, many = (like(compared, devices, sparse=False, measured=True).count for devices in (8, LARGE))
    assert few + many == sum(not c.tuned and not c.run.is_sparse for c in compared)


def test_without_a_run_the_spread_is_that_of_stacks_that_were_left_out(compared: list[Compared]) -> None:
    dense = [c for c in compared if not c.run.is_sparse]
    unseen = Spread.of(dense, unseen=True)
    assert unseen.count == len(dense)
    assert 0.15 < unseen.median < 0.22
    without, with_run = (like(compared, 8, sparse=False, measured=measured).median for measured in (False, True))
    assert without > 3 * with_run


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_a_stack_that_is_left_out_gives_nothing(name: str) -> None:
    other = other_stack(name)
    _, own_rows = calibrated(name, published_runs())
    _, rows = calibrated(other, published_runs())
    assert not {run.stack for run in rows} & {name}
    rule = CALIBRATIONS[other].products
    assert rule != name
    assert rule not in [run.stack for run in own_rows]


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("Megatron MXFP8 GB300", "Megatron MXFP8 GB200"),
        ("Megatron BF16 A100", "Megatron FP16 A100"),
        ("Megatron NVFP4 B300", "Megatron NVFP4 GB200"),
        ("torchtitan eager FP8", "torchtitan compile FP8"),
        ("llm-foundry BF16 H200", "llm-foundry BF16 H100"),
        ("DeepSpeed BF16 A100", "llm-foundry BF16 A100"),
        ("DeepSpeed FP8 H100", "llm-foundry FP8 H100"),
    ],
)
def test_a_stack_without_shares_takes_those_of_the_most_similar_one(name: str, similar: str) -> None:
    assert known_stack(name) == similar
    assert known_stack(similar) == similar


def test_a_row_of_another_stack_is_predicted_and_the_table_says_with_what() -> None:
    row = next(run.row for run in published_runs() if run.stack == "llm-foundry BF16 H100" and run.devices == 16)
    known, (other,) = compare([row], read_tables())[0], compare([dict(row, framework="Colossal-AI")], read_tables())
    assert other.predicted == pytest.approx(known.predicted, rel=0.1)  # but for attention of later tokens
    assert "no shares are known of Colossal-AI BF16 H100, which takes those of llm-foundry BF16 H100" in (
        published_table([other])
    )
    with pytest.raises(ConfigError, match="has no rows"):
        compare([], read_tables())


def test_a_file_without_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(",".join(c for c in COLUMNS if c not in ("gpu", "mbs")) + "\n")
    with pytest.raises(ConfigError, match="lacks the columns gpu, mbs"):
        read_rows(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "H10"}, r"H10: unknown; did you mean H100\?"),
        ({"gpus": "many"}, r"row 1 \(GPT OSS 120B\) cannot be read: .*'many'"),
        ({"mbs": "0"}, "row 1 .* cannot be read"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_refused(change: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compare([dict(read_rows(PUBLISHED)[0], **change)], read_tables())
