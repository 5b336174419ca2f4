"""Which code and packages the workers get, how long they may take to start, and what is said of those that do not."""

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from helpers.conformance.cases import Case, config_of, plan_of
from helpers.files.golden import Golden
from helpers.jobs.quick_jobs import digits
from orchestrator.compat.ray.code_packages import make_package
from orchestrator.config.build import ConfigError
from orchestrator.driver.checked_runs import with_shared_cores
from orchestrator.driver.code.shipped_code import module_paths, requirements
from orchestrator.driver.code.worker_code import code_files
from orchestrator.driver.gang.slots import start_failure


def test_the_code_of_a_run_is_what_was_imported_from_its_directory(tmp_path: Path) -> None:
    own, never_imported, installed = (tmp_path / name for name in ("own.py", "other.py", "venv/site-packages/x.py"))
    installed.parent.mkdir(parents=True)
    for file in (own, never_imported, installed):
        file.write_text("")
    modules: list[Any] = [SimpleNamespace(__file__=f) for f in (str(own), str(installed), __file__, None)]
    assert list(code_files(tmp_path, modules)) == [str(own)]


def test_another_version_of_a_file_is_other_code(tmp_path: Path) -> None:
    module: Any = SimpleNamespace(__file__=str(tmp_path / "own.py"))
    found = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (tmp_path / "own.py").write_text(text)
        found.append(code_files(tmp_path, [module]))
    assert found[0] == found[2] != found[1]


def test_a_package_has_what_the_ignore_files_leave(tmp_path: Path) -> None:
    library = tmp_path / "library"
    (library / ".git").mkdir(parents=True)
    for name in ("code.py", "model.bin", ".git/index"):
        (library / name).write_text("")
    (library / ".rayignore").write_text("*.bin\n")
    for with_name, parent in ((False, ""), (True, "library/")):
        package = make_package(library, tmp_path / f"{with_name}.zip", with_name=with_name)
        assert sorted(zipfile.ZipFile(package).namelist()) == [f"{parent}.rayignore", f"{parent}code.py"]


def test_requirements_are_a_list_or_the_lines_of_a_file(tmp_path: Path, golden: Golden) -> None:
    assert requirements(("einops", "timm==1.0")) == ["einops", "timm==1.0"]
    (tmp_path / "needed.txt").write_text("# for the model\neinops\n\n--no-index\n")
    assert requirements(str(tmp_path / "needed.txt")) == ["einops", "--no-index"]
    with golden.raises(ConfigError):
        requirements("einops")


def test_modules_are_directories_python_files_and_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["module.py", "wheel-1.0-py3-none-any.whl", "data.csv"]
    for name in names:
        (tmp_path / name).write_text("")
    assert module_paths([*names[:2], "."]) == [*(tmp_path / name for name in names[:2]), tmp_path]
    with pytest.raises(ConfigError) as refused:
        module_paths([*names, "missing"])
    assert [e.partition(":")[0] for e in refused.value.errors] == [
        f"cluster.py_modules={tmp_path / name}" for name in ("data.csv", "missing")
    ]


@pytest.mark.parametrize(("workers", "factor"), [(2, 1), (16, 2)])
def test_workers_that_share_cores_have_more_time_to_start(workers: int, factor: float) -> None:
    config = config_of(Case(job=digits()), workers)
    plan = plan_of(config)  # on eight cores
    patient = with_shared_cores(config, processes_per_core=plan.processes_per_core).cluster
    before = config.cluster
    assert patient.start_timeout_s == factor * before.start_timeout_s
    assert patient.rendezvous_timeout_s == factor * before.rendezvous_timeout_s
    assert patient.pending_timeout_s == before.pending_timeout_s


def test_a_worker_that_does_not_start_is_described_in_one_line(golden: Golden) -> None:
    package = ray.exceptions.RuntimeEnvSetupError("Failed to download\nIOError: the package is gone\n")
    golden.says(start_failure(package, host="gpu-7"))
    died = ray.exceptions.ActorDiedError()
    assert start_failure(died, host="gpu-7").startswith("a worker died on gpu-7 while it started: ActorDiedError: ")
    killed = ray.exceptions.OutOfMemoryError("Refer to the documentation")
    assert start_failure(killed, host="gpu-7").endswith(
        "the node ran out of memory; lower strategy.num_workers, or end what else uses the memory of the node"
    )
