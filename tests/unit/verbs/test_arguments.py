"""What `orchestrator.run` accepts, and what Hydra reads from it; how a run in Python is interrupted."""

import contextlib
import os
import random
import signal
import sys
import threading
import warnings
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import orchestrator
from helpers.files.golden import Golden
from jobs.digits import Digits
from orchestrator.config.arguments import read_arguments, too_large
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.job_loader import is_importable, load_job
from orchestrator.config.recorded_config import to_dict
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import JobSpec
from orchestrator.config.typed import plain
from orchestrator.driver.code.worker_code import pickle_job
from orchestrator.driver.preflight.record import command_line
from orchestrator.driver.process.host_process import only_run, unchanged
from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.strategies import registry

TEXTS = [
    "a b", " a ", "a,b", "{a}", "[1,2]", "null", "true", "1e3", "007", "-5", "nan", "", "it's", 'say "x"', "it's \"x\"",
    "'q'", "back\\", "b\\'s", "\\", "${x}", "a\\${x}", "${", "\\${", "c$", "a}b", "line\nbreak", "ü—", "#c", "a=b", "?",
    "~/a(1).txt", "sqlite:///a b.db", "a:b", "x'",
]  # fmt: skip


def overrides(*positional: Any, **keywords: Any) -> list[str]:
    return list(read_arguments(positional, keywords).overrides)


@pytest.mark.parametrize(
    "read",
    [
        overrides(["strategy=ddp", "train.steps=100"]),
        overrides("strategy=ddp", "train.steps=100"),
        overrides({"strategy": "ddp", "train.steps": 100}),
        overrides(strategy="ddp", train={"steps": 100}),
        overrides({"strategy": {"name": "ddp"}}, ["train.steps=100"]),
        overrides([{"strategy": "ddp"}, "train.steps=100"]),
    ],
)
def test_every_form_says_the_same(read: list[str]) -> None:
    assert read == ["strategy=ddp", "train.steps=100"]


def test_values_have_hydras_spelling() -> None:
    assert overrides(a=None, b=True, c=1e-5, d=[1, "x y", None], e=float("inf"), f=Path("/a b"), g={}) == [
        "a=null", "b=true", "c=1e-05", "d=[1,'x y',null]", "e=inf", "f='/a b'", "g={}",
    ]  # fmt: skip
    assert overrides(a=np.float32(0.5), b=torch.tensor(3), c=np.bool_(True), d=np.float64(0.25), e=(1, 2)) == [
        "a=0.5", "b=3", "c=true", "d=0.25", "e=[1,2]",
    ]  # fmt: skip


def test_keys_are_read_back_as_they_were_given() -> None:
    names = {"1.10": "1_0", "007": "1e5", "a b": "yes", "a.b": None, "x": "1"}
    errors: list[str] = []
    _, spec = compose(overrides(job={"names": names, "numbered": {1: "a"}}), errors, registry.config_class)
    assert errors == []
    assert {str(key): value for key, value in spec.fields["names"].items()} == names
    assert plain(spec.fields["numbered"]) == {1: "a"}


def test_text_is_read_back_as_it_was_given() -> None:
    given = {
        "text": {f"k{i}": text for i, text in enumerate(TEXTS)},
        "list": TEXTS,
        "nested": [{"k": t} for t in TEXTS],
    }
    errors: list[str] = []
    _, spec = compose(overrides(job=given), errors, registry.config_class)
    assert errors == []
    assert spec.fields == given


@pytest.mark.parametrize(
    "strategy", ["ddp_pipeline", pytest.param("parameter_server", marks=pytest.mark.needs("asynchronous"))]
)
def test_the_configuration_of_a_run_is_a_mapping(strategy: str) -> None:
    errors: list[str] = []
    config, _ = compose([f"strategy={strategy}", "job=gpt", "name=a b"], errors, registry.config_class)
    assert config is not None
    again, _ = compose(overrides(to_dict(config)), errors, registry.config_class)
    assert errors == []
    assert again == config


@pytest.mark.parametrize(
    ("positional", "keywords", "said"),
    [
        ((5,), {}, "orchestrator.run: cannot use a value of type int; give 'key=value' strings"),
        ((["a=b", None],), {}, "orchestrator.run: cannot use a value of type NoneType"),
        ((int,), {}, "orchestrator.run: cannot use the class int"),
        ((Digits, Digits()), {}, "orchestrator.run: 2 jobs were given; a run trains one"),
        ((), {"train": {"steps": object()}}, "train.steps: cannot be a value of type object; give text, a number"),
        ((), {"job": {"sizes": {1, 2}}}, "or pass an instance of the job that has it"),
        (({"a b": 1},), {}, "'a b': expected a key like train.steps"),
        (({3: 1, "": 2},), {}, "'': expected a key like train.steps"),
    ],
)
def test_what_means_nothing_is_refused_in_a_sentence(positional: Any, keywords: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        orchestrator.run(*positional, **keywords)
    (error,) = refused.value.errors
    assert said in error


@dataclass(frozen=True, kw_only=True)
class Holding(Digits):
    """Anything may be in ``held``."""

    held: Any = None


MANY = [f"text {i}" for i in range(50_000)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held", "said"),
    [
        (MANY, "2,000 values"),
        ({text: 0 for text in MANY}, "2,000 values"),
        ({"a": [[Digits()] * 300]}, "2,000 values"),
        ("x" * 200_000, "131,072 characters"),
        (b"x" * 200_000, "131,072 characters"),
    ],
    ids=["list", "mapping", "nested", "text", "bytes"],
)
def test_data_in_a_field_belongs_into_the_dataset(held: Any, said: str) -> None:
    """Also if the class builds it, and before anything copies it."""
    fields = [("held", Any, field(default_factory=lambda: held))]
    by_default = make_dataclass("Filled", fields, bases=(Holding,), frozen=True, kw_only=True)
    calls: list[tuple[Any, ...]] = [(Holding(held=held),), (Holding(held=held), {"seed": -1}), (by_default,)]
    if not isinstance(held, bytes):
        calls += [(Holding, {"job": {"held": held}}), (Holding, {"job.held": held})]
    for arguments in calls:
        with pytest.raises(ConfigError) as refused:
            orchestrator.run(*arguments)
        assert refused.value.errors[-1] == (
            f"job.held: holds more than {said}, which every record of the run would repeat; let Job.dataset read data, "
            "such as from a file that the field names"
        )


def test_names_of_classes_may_be_in_a_field() -> None:
    assert too_large({"names": MANY[:1000], "tensor": torch.zeros(10**6)}) == []


def test_a_job_may_be_an_argument_or_the_value_of_its_key() -> None:
    job = Digits(hidden=4)
    assert read_arguments([job], {"seed": 1}).job is job
    assert read_arguments([], {"job": Digits}).job is Digits
    assert read_arguments([{"job": job}], {}).overrides == ()


def test_the_fields_of_an_instance_are_not_set_again(golden: Golden) -> None:
    errors: list[str] = []
    assert load_job(JobSpec(target="x.Digits", fields={"hidden": 5}), errors, given=Digits(hidden=4)) is None
    golden.says(errors)


def test_a_class_is_checked_as_one_that_is_imported(golden: Golden) -> None:
    errors: list[str] = []
    assert load_job(JobSpec(target="x.Job", fields={}), errors, given=orchestrator.Job) is None
    assert load_job(JobSpec(target="x.Digits", fields={"hiden": 5}), errors, given=Digits) is None
    assert load_job(JobSpec(target="__main__.Digits", fields={}), errors) is None
    golden.says(errors)


def test_only_a_class_of_a_module_is_importable() -> None:
    class Local(Digits):
        pass

    assert is_importable(Digits)
    assert not is_importable(Local)


def test_a_job_that_cannot_be_pickled_says_why(golden: Golden) -> None:
    lock = threading.Lock()

    class Locked(Digits):
        def check(self) -> None:
            lock.locked()

    errors: list[str] = []
    assert pickle_job(Locked, Locked(), errors) is None
    golden.says(errors[0])


def test_a_job_without_an_import_path_is_started_again_from_python() -> None:
    words = overrides({"strategy": "ddp", "resume": "/a", "job": {"api_key": "it's me"}})
    said = command_line(words, Redactor(), job="MyJob(...)")
    assert said == "orchestrator.run(MyJob(...), 'strategy=ddp', 'resume=/a', 'job.api_key=***')"


def test_a_result_is_readable() -> None:
    summary = {"final_loss": 0.25, "val_accuracy": 0.975, "steps": 20, "startup": {"driver_s": 1}, "val_x": None}
    done = RunResult(status="FINISHED", exit_code=0, run_dir=Path("/runs/a"), summary=summary)
    assert repr(done) == "RunResult(FINISHED, steps=20, final_loss=0.25, val_accuracy=0.975, run_dir='/runs/a')"
    failed = RunResult(status="FAILED", exit_code=1, run_dir=Path("/runs/a"), reason="rank 1 failed")
    assert repr(failed) == "RunResult(FAILED, reason='rank 1 failed', run_dir='/runs/a')"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_second_signal_is_an_exception_in_the_program(number: signal.Signals, error: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        os.kill(os.getpid(), number)
        assert stop.received == number
        # Ray catches the exception in its own code.
        with pytest.raises(error), stop.raising(), contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # while workers are released
    assert signal.getsignal(number) is before


def test_one_run_at_a_time() -> None:
    with only_run(), pytest.raises(RuntimeError, match=r"another orchestrator\.run is in progress"):
        orchestrator.run(plan=True)
    with only_run():
        pass


def test_a_run_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_OWN", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", print)
    before = dict(os.environ), list(sys.path), list(warnings.filters), random.getstate(), torch.get_rng_state().tolist()
    with unchanged():
        os.environ |= {"RAY_OWN": "2", "RAY_NEW": "1", "PYTHONBREAKPOINT": "x"}
        sys.path.append(str(tmp_path))
        sys.excepthook = repr
        warnings.simplefilter("ignore")
        random.random()
        torch.rand(1)
    after = dict(os.environ), list(sys.path), list(warnings.filters), random.getstate(), torch.get_rng_state().tolist()
    assert after == before
    assert sys.excepthook is print
