"""`orchestrator.run` in programs of other people: a plain script, threads, a Hydra program, a Ray of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.machines.commands import environment

SCRIPT = '''
import ctypes, faulthandler, logging, os, random, signal, sys, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import ray, orchestrator.driver.session  # their imports may change things; a run may not
import orchestrator
from jobs.digits import Digits
from hydra.core.singleton import Singleton


def scale():
    return 0.5


@dataclass(frozen=True, kw_only=True)
class Mine(Digits):
    """Cannot be imported by the workers, and refers to a function that they cannot import either."""

    text: str = ""

    def loss(self, output, target):
        assert self.text == "a b, {c} ${d}"
        return super().loss(output, target) * scale()


def below_python(number):
    action = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).sigaction(number, None, action)
    return action.raw[:8]  # the handler


def state():
    internals = ray._private.worker.print_to_stdstream, ray._private.services.ConsolePopen
    loggers = [logging.root, *map(logging.getLogger, ("ray", "mlflow", "hydra", "torch"))]
    instances = {cls.__name__: vars(one).copy() for cls, one in Singleton._instances.items()}
    return {
        "environment": dict(os.environ),
        "loggers": [(one.level, list(one.handlers), one.propagate, one.disabled) for one in loggers],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "below Python": [below_python(n) for n in (2, 15, 6, 11, 7, 5)],
        "faulthandler": faulthandler.is_enabled(),
        "hooks": (sys.excepthook, threading.excepthook, sys.displayhook, sys.unraisablehook),
        "paths": (os.getcwd(), list(sys.path), list(sys.meta_path), list(sys.argv)),
        "warnings": list(warnings.filters),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "torch": (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_default_dtype(),
                  "torch._dynamo" in sys.modules),
        "patches": internals,
        "hydra": {name: instances.get(name) for name in ("GlobalHydra", "JobRuntime", "VersionBase")},
        "streams": (sys.stdout, sys.stderr),
    }


signal.signal(signal.SIGTERM, lambda *_: None)
sys.excepthook = lambda *error: sys.__excepthook__(*error)
before = state()
common = {"strategy": "single", "tracking": "none", "train": {"steps": 10, "eval_every": 0, "deterministic": True}}
fields = {"hidden": 8, "text": "a b, {c} ${d}"}
first = orchestrator.run(Mine(**fields), common, name="mine")
after = state()
changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
assert not changed, changed
assert not ray.is_initialized()
assert first.status == "FINISHED", first

# In another thread, where no signal handler can be set, the class alone, and a run in this thread meanwhile.
with ThreadPoolExecutor(1) as threads:
    common["train"]["steps"] = 20
    second = threads.submit(orchestrator.run, Mine, common, name="mine", job=fields, resume=str(first.run_dir))
    while not second.done() and not ray.is_initialized():
        time.sleep(0.01)
    try:
        orchestrator.run(Digits)
    except RuntimeError as e:
        print(e)
    assert second.result().run_dir == first.run_dir, second.result()
after = state()
changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
assert not changed, changed
'''

HYDRA_PROGRAM = """
import logging, os

import hydra
import ray
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime

import orchestrator
from jobs.digits import Digits


@hydra.main(version_base="1.2", config_path=None, config_name=None)
def main(cfg):
    hydra_before = GlobalHydra.instance().hydra
    handlers = list(logging.root.handlers)
    ray.init(address="local", num_cpus=3, include_dashboard=False)
    kept = ray.put("kept")
    try:
        orchestrator.run(cfg.run, strategy={"num_workers": 4})
    except orchestrator.ConfigError as e:
        print(e)
    result = orchestrator.run(cfg.run, job=Digits, strategy={"num_workers": 3})
    assert result.status == "FINISHED", result
    assert result.run_dir.is_relative_to(os.getcwd()), "outputs/ is in the directory that Hydra changed to"
    assert ray.get(kept) == "kept"
    assert GlobalHydra.instance().hydra is hydra_before is not None
    assert (HydraConfig.get().job.name, JobRuntime.instance().get("name")) == ("program", "program")
    assert logging.root.handlers == handlers
    print("result", result)


main()
"""


def run_script(text: str, *words: str, folder: Path) -> str:
    script = folder / "program.py"
    script.write_text(text)
    command = [sys.executable, script.name, *words]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.campaign
def test_a_script_with_a_job_of_its_own_stays_as_it_is(tmp_path: Path) -> None:
    output = run_script(SCRIPT, folder=tmp_path)
    assert "another orchestrator.run is in progress in this process" in output
    assert "resumed from step 10" in output
    (file,) = tmp_path.glob("outputs/*/*/run.json")
    record = json.loads(file.read_text())
    assert record["params"]["job._target_"] == "__main__.Mine"
    assert record["params"]["job.text"] == "a b, {c} ${d}"
    assert record["command"].startswith("orchestrator.run(Mine, 'strategy=single', ")
    assert record["summary"]["steps"] == 20


@pytest.mark.campaign
def test_in_a_hydra_program_beside_a_ray_of_its_own(tmp_path: Path) -> None:
    words = ("hydra.job.chdir=true", "+run.strategy=ddp", "+run.tracking=none", "+run.train.steps=10",
             "+run.train.eval_every=0")  # fmt: skip
    output = run_script(HYDRA_PROGRAM, *words, folder=tmp_path)
    assert "needs 4 x 1 CPUs, there is room for 3" in output
    assert "3 workers" in output
    assert "result RunResult(FINISHED, steps=10, " in output
