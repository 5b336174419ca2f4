"""`orchestrator export`: a run becomes a directory that other programs load."""

import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.files.golden import Golden
from helpers.records.runs import in_campaign
from jobs.digits import Digits
from jobs.gpt import GPT
from orchestrator import Steering, export
from orchestrator.compat.generators import seed_generators
from orchestrator.config.recorded_config import to_yaml
from orchestrator.config.redact import MASK
from orchestrator.features.export.__main__ import _weights
from orchestrator.features.export.__main__ import main as export_for_mlflow
from orchestrator.job import Job, Split
from orchestrator.planning.placement import Box
from orchestrator.records import run_dir as rundir
from orchestrator.records.run_dir import RunDir
from orchestrator.state.best import BestSoFar
from orchestrator.state.checkpoint import save
from orchestrator.state.model_state import checksum
from orchestrator.state.train_state import capture
from orchestrator.strategies.update.weight_average import keep_average

TINY = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 97, "path": "gone.npy"}
VARIANTS = {
    "gpt2": {},
    "gpt2, tied": {"tied": True},
    "llama": {"variant": "llama", "kv_heads": 2},
    "tied": {"variant": "llama", "tied": True},
}


def run_of(tmp_path: Path, job: Job, **fields: Any) -> tuple[RunDir, torch.nn.Module]:
    """A run of ``job`` with a checkpoint, and its model, whose weights are far from the initial ones."""
    run = rundir.create(tmp_path, "a b")
    run.update_record(name="a b", uid="first", state="finished")
    target = f"{type(job).__module__}.{type(job).__name__}"
    run.config_file.write_text(to_yaml({"job": {"_target_": target, **fields}}))
    torch.manual_seed(0)
    model = job.model()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    optimizer = job.optimizer(model.parameters())
    save(run.checkpoints, capture(model, optimizer, None, step=1200, samples_consumed=30), run_uid="first")
    return run, model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gpt2, tied", "llama", *in_campaign("gpt2", "tied")])
def test_transformers_loads_the_model_with_the_same_logits(
    tmp_path: Path, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {**TINY, **VARIANTS[variant]}
    run, model = run_of(tmp_path, GPT(**fields), **fields)
    assert export.main([str(run.path), "--format", "hf", "--to", str(tmp_path / "new" / "model")]) == 0
    said = capsys.readouterr().out
    assert f"the model after step 1,200 is in {tmp_path / 'new' / 'model'}" in said
    assert "its output is that of the trained model, for an input of the right form (difference" in said
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "new" / "model").iterdir()}
    assert modes == {run.config_file.stat().st_mode & 0o777}, "others may read it"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "model").eval()
    tokens = torch.randint(97, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["one two"], vocab_size=97, special_tokens=["<end>"], show_progress=False)
    made.save(str(tmp_path / "tokenizer.json"))
    fields: dict[str, Any] = {
        **TINY, **VARIANTS["llama"], "vocabulary": 300, "end_token": 0, "tokenizer": str(tmp_path / "tokenizer.json")
    }  # fmt: skip
    run, _ = run_of(tmp_path, GPT(**fields), **fields)
    assert export.main([str(run.path), "--to", str(tmp_path / "model")]) == 0
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded("one  two\n").input_ids == made.encode("one  two\n").ids
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert config.eos_token_id == 0, "so that generation ends with a document"
    assert (loaded.eos_token, loaded.decode(loaded("one  two\n").input_ids)) == ("<end>", "one  two\n")


def test_what_exists_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = run_of(tmp_path, GPT(**TINY), **TINY)  # type: ignore[arg-type]
    (tmp_path / "taken").mkdir()
    assert export.main([str(run.path), "--to", str(tmp_path / "taken")]) == 2
    assert f"--to={tmp_path / 'taken'}: exists already" in capsys.readouterr().err
    assert list((tmp_path / "taken").iterdir()) == []


@dataclass(frozen=True, kw_only=True)
class Uncompared(GPT):
    """Is exported without another process, which takes seconds."""

    exported = Job.exported


@dataclass(frozen=True, kw_only=True)
class HeadOnly(Uncompared):
    """Trains its head alone, and has other frozen parameters with another standard deviation."""

    std: float = 0.02

    def model(self) -> torch.nn.Module:
        model = super().model().requires_grad_(False)
        torch.nn.init.normal_(model.get_parameter("embed.token.weight"), std=self.std)
        model.get_submodule("head").requires_grad_()
        return model


def test_what_a_checkpoint_leaves_out_is_built_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    job = HeadOnly(**TINY)  # type: ignore[arg-type]
    run, _ = run_of(tmp_path, job, **TINY)
    seed_generators(5)
    model = job.model()
    left_out = {n: checksum(p, Box.whole(p.shape)) for n, p in model.named_parameters() if not p.requires_grad}
    torch.nn.init.ones_(model.get_parameter("head.weight"))
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    save(
        run.checkpoints,
        capture(model, optimizer, None, step=1300, samples_consumed=30, left_out=left_out),
        run_uid="first",
    )
    config, target = {"seed": 5}, f"{HeadOnly.__module__}.HeadOnly"
    for number, std in enumerate((0.02, 0.03)):
        run.config_file.write_text(to_yaml({**config, "job": {"_target_": target, **TINY, "std": std}}))
        assert export.main([str(run.path), "--to", str(tmp_path / f"new-{number}")]) == 2 * number
    theirs = load_file(tmp_path / "new-0" / "model.safetensors")
    torch.testing.assert_close(theirs["transformer.wte.weight"], model.get_parameter("embed.token.weight"))
    assert bool((theirs["lm_head.weight"] == 1).all())
    golden.says(capsys.readouterr().err)


@pytest.mark.parametrize("metric", ["val/ema_loss", "val/loss"])
def test_the_weights_that_the_best_evaluation_has_judged_are_exported(
    tmp_path: Path, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields: dict[str, Any] = {**TINY, "variant": "llama", "tied": True}
    job = Uncompared(**fields)
    run, _ = run_of(tmp_path, job, **fields)
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    keep_average(optimizer, 0.75)
    for value in (0.0, 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            torch.nn.init.constant_(parameter, value + 0.5)  # and 0.5 less after the update
        optimizer.step()
    best = BestSoFar(metric=metric, direction="minimize", step=1300, value=0.5)
    saved = capture(model, optimizer, None, step=1300, samples_consumed=30, best=best.to_json())
    save(run.checkpoints, saved, run_uid="first")
    assert export.main([str(run.path), "--best", "--to", str(tmp_path / "new")]) == 0
    averaged = metric == "val/ema_loss"
    said = (
        "the model after step 1,300, with averaged weights, is in" if averaged else "the model after step 1,300 is in"
    )
    assert said in capsys.readouterr().out
    for_mlflow, weights, _ = _weights(run, tmp_path)
    assert weights is not None
    assert for_mlflow.averaged == averaged
    exported = load_file(tmp_path / "new" / "model.safetensors")
    for tensors in (exported, weights):
        assert {float(tensor.min()) for tensor in tensors.values()} == {0.25 if averaged else 1.0}
        assert {float(tensor.max()) for tensor in tensors.values()} == {0.25 if averaged else 1.0}


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    run, _ = run_of(tmp_path, GPT(**TINY), **{**TINY, "layers": 3})  # type: ignore[arg-type]
    folder = tmp_path / "exports"
    assert export.main([str(run.path), "--to", str(folder / "model")]) == 2
    golden.says(capsys.readouterr().err)
    assert list(folder.iterdir()) == []


@dataclass(frozen=True, kw_only=True)
class Tempered(Digits):
    """Writes the field by which its last evaluation but one has steered it."""

    temperature: float = 1.0
    export_formats = ("text",)
    steerable = ("temperature",)

    def on_evaluation(self, evaluations: Any) -> Steering:
        return Steering(fields={"temperature": 0.5 ** len(evaluations)})

    def export(self, weights: Any, directory: Path, format: str) -> None:
        directory.mkdir()
        (directory / "temperature").write_text(str(self.temperature))


def test_an_export_has_the_fields_of_the_last_step(tmp_path: Path) -> None:
    run, model = run_of(tmp_path, Tempered())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluations = [{"step": step, "metrics": {}} for step in (1200, 1300)]
    saved = capture(model, optimizer, None, step=1300, samples_consumed=30, evaluations=evaluations)
    save(run.checkpoints, saved, run_uid="first")
    assert export.main([str(run.path), "--format", "text", "--to", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "temperature").read_text() == "0.5"


@dataclass(frozen=True, kw_only=True)
class Ending(Digits):
    """Its export does not return."""

    export_formats = ("hf",)
    how: str

    def export(self, weights: Any, directory: Path, format: str) -> None:
        directory.mkdir()
        if self.how == "exit":
            sys.exit(0)
        if self.how == "closed terminal":
            os.kill(os.getpid(), signal.SIGHUP)
        directory.rmdir()


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("exit", 2, "export: Ending.export calls sys.exit(0) (test_export.py, line "),
        ("closed terminal", 130, ""),
        ("nothing", 2, "export: Ending.export: wrote nothing; write into the directory that it is given"),
    ],
)
def test_an_export_that_is_ended_or_writes_nothing_leaves_nothing(
    tmp_path: Path, how: str, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields: dict[str, Any] = {"hidden": 4, "depth": 2, "how": how}
    run, _ = run_of(tmp_path, Ending(**fields), **fields)
    assert export.main([str(run.path), "--to", str(tmp_path / "exports" / "model")]) == code
    assert capsys.readouterr().err.startswith(text)
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_model_that_transformers_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    fields: dict[str, Any] = {**TINY, "kv_heads": 2}
    run, _ = run_of(tmp_path, GPT(**fields), **fields)
    assert export.main([str(run.path), "--to", str(tmp_path / "model")]) == 2
    golden.says(capsys.readouterr().err)


def test_a_damaged_checkpoint_is_named_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = run_of(tmp_path, GPT(**TINY), **TINY)  # type: ignore[arg-type]
    (file,) = run.checkpoints.glob("*/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert export.main([str(run.path), "--to", str(tmp_path / "exports" / "model")]) == 2
    assert str(file.parent) in capsys.readouterr().err
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--format", "onnx"], "--format=onnx: no format of jobs.gpt.GPT; valid: hf"),
        (["--best"], "--best: the run was trained without checkpoint.best"),
        (["--address", "auto"], "--address=auto: run `orchestrator export` where the run is"),
    ],
)
def test_says_why_it_cannot(tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = run_of(tmp_path, GPT(**TINY), **TINY)  # type: ignore[arg-type]
    assert export.main([str(run.path), *words, "--to", str(tmp_path / "model")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_job_without_formats_and_a_run_without_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    run, _ = run_of(tmp_path, Digits(hidden=4, depth=2), hidden=4, depth=2)
    assert export.main([str(run.path), "--to", str(tmp_path / "model")]) == 2
    golden.says(capsys.readouterr().err)
    empty = rundir.create(tmp_path, "empty")
    empty.update_record(name="empty", uid="second", state="failed")
    empty.config_file.write_text(to_yaml({"job": {"_target_": "jobs.gpt.GPT"}}))
    assert export.main([str(empty.path), "--to", str(tmp_path / "model")]) == 2
    assert f"export: {empty.path}: it has no checkpoint\n" in capsys.readouterr().err
    empty.config_file.write_text(to_yaml({"job": {"_target_": "jobs.gpt.GPT"}, "evaluate": "another"}))
    assert export.main([str(empty.path), "--to", str(tmp_path / "model")]) == 2
    golden.says(capsys.readouterr().err, RUN=empty.path)


@dataclass(frozen=True, kw_only=True)
class Private(Digits):
    """Reads its secret as docs/security.md advises."""

    token: str = field(default_factory=lambda: os.environ["PRIVATE_TOKEN"])
    api_key: str = ""
    export_formats = ("mine",)

    def dataset(self, split: Split) -> Any:
        if self.token == MASK:
            raise ValueError("401")
        return super().dataset(split)

    def export(self, weights: Any, directory: Path, format: str) -> None:
        directory.mkdir()
        (directory / "token").write_text(self.token)


def test_a_job_with_a_secret_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIVATE_TOKEN", "hunter22")
    run, _ = run_of(tmp_path, Private(), token=MASK)
    assert export.main([str(run.path), "--format", "mine", "--to", str(tmp_path / "made")]) == 0
    assert (tmp_path / "made" / "token").read_text() == "hunter22"
    export_for_mlflow(run, tmp_path / "uploaded", ["dataset"])
    assert json.loads((tmp_path / "uploaded" / "facts.json").read_text())["dataset"] is not None
    run.config_file.write_text(run.config_file.read_text() + f"  api_key: '{MASK}'\n")
    assert export.main([str(run.path), "--format", "mine", "--to", str(tmp_path / "other")]) == 2
    assert f"job.api_key={MASK}: {MASK} stands for a secret" in capsys.readouterr().err


@pytest.mark.slow
def test_the_model_in_mlflow_has_weights_of_the_type_that_its_graph_takes(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"hidden": 4, "depth": 2}
    run, model = run_of(tmp_path, Digits(**fields), **fields)
    optimizer = Digits(**fields).optimizer(model.parameters())
    state = capture(model.bfloat16(), optimizer, None, step=1300, samples_consumed=30)
    save(run.checkpoints, state, run_uid="first")
    export_for_mlflow(run, tmp_path / "uploaded", ["model"])
    facts = json.loads((tmp_path / "uploaded" / "facts.json").read_text())
    assert (facts["problem"], facts["step"]) == (None, 1300)
    assert {t.dtype for t in load_file(tmp_path / "uploaded" / "model.safetensors").values()} == {torch.float32}
    assert not (tmp_path / "uploaded" / "found.npz").exists()
