"""The private parts of torch: each is still there and does what the project needs it for."""

import ast
import copy
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from orchestrator.compat import backends, loader_processes, modules, process_groups
from orchestrator.compat import torch as compat
from orchestrator.protocol.flight import Enqueued, enqueued_in

ROOT = Path(__file__).resolve().parents[3]


def test_the_bytes_of_a_tensor_are_its_memory_whatever_its_strides() -> None:
    rows = torch.arange(12.0).view(4, 3)
    for tensor in (rows, rows.t(), rows[0, 0], rows[:0], rows[2:, 1:2][:1], rows[:, 1].as_strided((1,), (5,), 4)):
        assert bytes(compat.as_bytes(tensor).tolist()) == tensor.numpy().tobytes()
    compat.as_bytes(rows[2:3, 1:2]).zero_()
    assert rows[2, 1] == 0.0


@pytest.mark.campaign
def test_the_warning_about_the_memory_of_fake_tensors_is_hidden() -> None:
    """In a process of its own, because torch warns once in each."""
    script = (
        "from torch import nn, ones\n"
        "from orchestrator.compat.torch import FakeTensorMode, without_fake_tensor_logs\n"
        "with FakeTensorMode():\n    parameter = nn.Parameter(ones(2))\n"
        "with without_fake_tensor_logs():\n    parameter.data_ptr()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error:Accessing the data pointer", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_name_exists() -> None:
    missing = [name for name in compat.__all__ if not hasattr(compat, name)]
    assert not missing


@pytest.mark.parametrize(
    "name",
    [
        *("TreeSpec", "keystr", "tree_flatten", "tree_leaves", "tree_leaves_with_path", "tree_map", "tree_map_only"),
        *("tree_structure", "tree_unflatten"),
    ],
)
def test_pytree_has(name: str) -> None:
    assert hasattr(compat.pytree, name), f"torch {torch.__version__} has no torch.utils._pytree.{name}"


def test_a_version_counts_in_place_changes() -> None:
    tensor = torch.zeros(2)
    before = compat.version_of(tensor)
    tensor.add_(1)
    assert compat.version_of(tensor) == before + 1


def test_views_are_recognised() -> None:
    tensor = torch.zeros(2, requires_grad=True) * 1
    assert compat.is_view(tensor[:1])
    assert not compat.is_view(tensor)


def test_a_storage_is_recognised_also_without_memory() -> None:
    for device in ("cpu", "meta"):
        tensor, other = torch.zeros(2, device=device), torch.zeros(2, device=device)
        key = compat.storage_key(tensor.untyped_storage())
        assert key == compat.storage_key(tensor[1:].untyped_storage())
        assert key != compat.storage_key(other.untyped_storage())


def test_operators_that_change_an_argument_are_recognised() -> None:
    assert compat.mutates(torch.ops.aten.add_.Tensor)
    assert not compat.mutates(torch.ops.aten.add.Tensor)


def test_attributes_and_hooks_of_a_parameter_are_adopted() -> None:
    source, target = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    called: list[str] = []
    source.register_hook(lambda _: called.append("gradient"))
    source.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    source.no_weight_decay = True  # type: ignore[attr-defined]
    compat.adopt_user_state(target, source)
    target.sum().backward()
    assert target.no_weight_decay  # type: ignore[attr-defined]
    assert called == ["gradient", "accumulated"]


def test_a_fake_parameter_is_converted_in_place_and_torch_is_restored() -> None:
    swap = torch.utils.swap_tensors
    with compat.FakeTensorMode():
        layer = nn.Linear(2, 2)
        weight = layer.weight
        with compat.setting_fake_data():
            layer.to(torch.float64)
    assert layer.weight is weight
    assert isinstance(weight, compat.FakeTensor)
    assert weight.dtype == torch.float64
    assert torch.utils.swap_tensors is swap


def test_a_copy_of_a_fake_parameter_has_its_mode_and_torch_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    with compat.FakeTensorMode(), compat.without_fake_tensor_logs():
        layer = nn.Linear(2, 2)
        copied = copy.deepcopy(layer)
    assert isinstance(layer.weight, compat.FakeTensor)
    assert isinstance(copied.weight, compat.FakeTensor)
    assert copied.weight is not layer.weight
    assert copied.weight.fake_mode is layer.weight.fake_mode
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_every_batch_norm_is_one(kind: type[nn.Module]) -> None:
    assert issubclass(kind, compat.BatchNorm)


def test_the_tensors_and_children_of_a_module() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module.register_buffer("mask", torch.ones(1))
    module.scale = nn.Parameter(torch.ones(1))
    assert list(modules.own_parameters(module)) == ["scale"]
    assert list(modules.own_buffers(module)) == ["mask"]
    assert list(modules.own_children(module)) == ["0"]
    replica = modules.data_parallel_replica(module)
    assert modules.own_parameters(replica) == {}
    assert modules.own_buffers(replica)["mask"] is module.mask
    assert modules.own_buffers(replica) is not modules.own_buffers(module)
    assert modules.own_children(replica) is not modules.own_children(module)


@pytest.fixture
def process_group() -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_all_groups_are_aborted_together() -> None:
    side = dist.new_group([0])
    groups = process_groups.abort_process_groups()
    assert len(groups) == 2
    assert side in groups
    assert not dist.is_initialized()


class Communicator:
    """One whose kernel ends only when another is aborted too, as on a device that both use."""

    def __init__(self, all_flagged: threading.Barrier):
        self._all_flagged = all_flagged

    def abort(self) -> None:
        self._all_flagged.wait(60)


def test_no_abort_waits_for_another() -> None:
    all_flagged = threading.Barrier(3)
    process_groups.abort_together([Communicator(all_flagged) for _ in range(3)])
    assert not all_flagged.broken
    process_groups.abort_together([])


def test_group_numbers_begin_again() -> None:
    world = dist.distributed_c10d._world
    world.group_count = 3
    process_groups.restart_group_numbers()
    assert world.group_count == 0


@pytest.mark.usefixtures("process_group")
def test_the_flight_record_has_what_was_enqueued() -> None:
    before_ns = time.time_ns()
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    entries = [
        e for e in json.loads(backends.flight_record(dist.group.WORLD))["entries"] if e["time_created_ns"] >= before_ns
    ]
    assert [e["profiling_name"] for e in entries] == ["gloo:all_reduce"] * 2
    expected = {"process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "retired", "state"}
    assert all(expected <= entry.keys() for entry in entries)


with_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
with_nccl2 = pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="torch has no nccl2, before 2.15")


def group_of(backend: str) -> Any:
    """A process group, as far as its backend is looked up."""
    return SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: backend))


@pytest.mark.parametrize("backend", [pytest.param("nccl", marks=with_nccl), pytest.param("nccl2", marks=with_nccl2)])
def test_each_nccl_has_a_flight_record_of_its_own(backend: str) -> None:
    assert backends.nccl_backend(group_of(backend)).name() == backend
    content = json.loads(backends.flight_record(group_of(backend)))
    assert {"pg_config", "version"} <= content.keys()
    assert "gloo" not in str(content.get("entries")), "the record of another backend"


def test_without_a_group_nothing_is_recorded() -> None:
    assert backends.nccl_backend(group_of("gloo")) is None
    assert enqueued_in(backends.flight_record(None), since_ns=0, world_size=2) == Enqueued()


@with_nccl2
def test_nccl2_has_what_runs_rely_on() -> None:
    for name in ("abort", "allreduce_coalesced", "name", "split"):
        assert callable(getattr(dist.ProcessGroupNCCL2, name))
    assert dist.ProcessGroupNCCL2.__module__ == distributed_c10d.__name__


@with_nccl2
def test_what_torch_records_of_nccl2_names_the_last_operation() -> None:
    """The hook that records nccl2 records every backend without a record of its own, here that of no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        hook = process_groups.c10d_bindings.FlightRecorderHook.attach(dist.group.WORLD, [0, 1])
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        dist.isend(torch.ones(1), 0)
        dump = process_groups.c10d_bindings._dump_fr_trace_json(backend="fake").decode()
        del hook
    finally:
        dist.destroy_process_group()
    found = enqueued_in(dump, since_ns=0, world_size=2)
    assert found.last == {"0": 2}
    assert found.operation == {"0": "fake:all_reduce"}
    assert found.members == {"0": (0, 1)}


@pytest.mark.slow
@with_nccl
def test_nccl_is_the_backend_from_which_runs_recover_and_another_one_is_refused() -> None:
    """In a process of its own, because torch decides once in each what ``nccl`` is."""
    script = (
        "import os\n"
        "from orchestrator.worker.process.network import nccl_variables\n"
        "os.environ |= nccl_variables(os.environ, recovers=True)\n"
        "import torch.distributed as dist\n"
        "from torch.distributed import distributed_c10d\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "from orchestrator.compat.backends import nccl_backend\n"
        "register = getattr(dist.Backend, '_ensure_backend_registered', None)\n"
        "if register is not None:  # torch 2.15\n"
        "    register('nccl')\n"
        "    creator = dist.Backend._plugins['NCCL'].creator_fn\n"
        "    assert creator is distributed_c10d._create_nccl_process_group, creator\n"
        "dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=2)\n"
        "nccl_backend(dist.group.WORLD)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_DIST")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert "is 'fake', from which a run cannot recover, unlike nccl and nccl2: unset TORCH_DIST" in done.stderr


IMPORTED_LATER = """
import importlib, pkgutil, sys
import torch.distributed as dist
import orchestrator.strategies, orchestrator.worker.actor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = sys.getrefcount(dist.group.WORLD)
for module in pkgutil.walk_packages(orchestrator.strategies.__path__, "orchestrator.strategies."):
    importlib.import_module(module.name)
for name in ("fsdp", "tensor", "nn", "checkpoint", "pipelining"):
    importlib.import_module(f"torch.distributed.{name}")
assert sys.getrefcount(dist.group.WORLD) == before
"""


@pytest.mark.slow
def test_no_module_that_is_imported_later_keeps_the_default_group() -> None:
    """Its connections would stay open after a failure, and ranks that wait in them would be taken for lost."""
    done = subprocess.run([sys.executable, "-c", IMPORTED_LATER], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("process_group")
def test_ddp() -> None:
    replica = DistributedDataParallel(nn.BatchNorm1d(3))
    for step in range(3):
        modules.set_ddp_timing(replica, enabled=step != 1)
        replica(torch.ones(4, 3)).sum().backward()
    waited_ms = modules.ddp_comm_ms(replica)
    assert waited_ms is None or waited_ms >= 0
    modules.release_ddp(replica)
    assert not {"reducer", "logger"} & vars(replica).keys()


def test_loader_processes_end() -> None:
    iterator = iter(DataLoader(torch.arange(8), num_workers=1))  # type: ignore[arg-type]
    next(iterator)
    loader_processes.end_loader_processes(iterator, terminate_after_s=5)
    assert loader_processes.loader_exit_codes(iterator) == []
    assert loader_processes.loader_exit_codes(iter([])) == []


def test_other_errors_are_not_the_loaders() -> None:
    """``test_loader.py`` has the errors that torch raises itself."""
    assert (
        loader_processes.loader_failure(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
        == "died"
    )
    assert loader_processes.loader_failure(RuntimeError("DataLoader timed out after 1 seconds")) == "timed out"
    assert loader_processes.loader_failure(RuntimeError("out of memory")) is None


def test_the_parameter_of_a_node() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert compat.parameter_of(get_gradient_edge(weight).node) is weight
    assert compat.parameter_of(get_gradient_edge(weight * 2).node) is None


PIPELINE_STAGE = """
import inspect
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from orchestrator.compat import pipelining

inputs, weight = torch.ones(1, requires_grad=True) * 1, torch.ones(1, requires_grad=True)
beside = weight * 2
output, source, branch = pipelining.nodes_of([inputs * 3 + beside, None, inputs, beside])
nodes = pipelining.nodes_between([output], [source])
assert output in nodes and source in nodes and branch not in nodes

class Checked(pipelining.ConnectedStage):
    checked = False

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        assert pipelining.microbatches_in_memory(self) == 1
        outputs, inputs = pipelining.saved_forward(self, bwd_chunk_id)
        assert len(outputs) == 1 and inputs == []
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.bwd_cache[7] = (torch.ones(2, 2).t(), None)
        pipelining.make_input_gradients_contiguous(self, 7)
        assert self.bwd_cache[7][0].is_contiguous() and self.bwd_cache.pop(7)[1] is None
        self.checked = True

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
x = torch.ones(1, 2)
stage = Checked(
    torch.nn.Linear(2, 2), 0, 1, torch.device("cpu"), input_args=x, output_args=x, group=dist.group.WORLD,
    backward_group=dist.group.WORLD,
)
ScheduleGPipe(stage, 1, loss_fn=lambda output, target: (output - target).sum()).step(x, target=x)
assert stage.checked and pipelining.microbatches_in_memory(stage) == 0

def takes(method, *names):
    found = inspect.signature(getattr(PipelineStage, method)).parameters
    assert set(names) <= set(found), f"{method} takes {list(found)}"

takes("forward_one_chunk", "fwd_chunk_id", "args", "kwargs")
takes("backward_one_chunk", "bwd_chunk_id", "loss", "full_backward", "last_backward")
takes("backward_weight_one_chunk", "bwd_chunk_id", "last_backward")
takes("forward_maybe_with_nosync")
takes("get_bwd_recv_ops", "bwd_chunk_id")
takes("get_bwd_send_ops", "bwd_chunk_id")
assert pipelining.sends_one_way("ZBVZeroBubble") and not pipelining.sends_one_way("1F1B")
"""


FULLY_SHARDED_IMPORT = "from orchestrator.compat.fully_sharded import FullySharded"
FULLY_SHARDED = """
import contextlib, gc, weakref
local_part = FullySharded.local_part

model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
model[0].scale = torch.nn.Parameter(torch.ones(()))
group = dist.group.WORLD
timed = {"gathering": contextlib.nullcontext, "scattering": contextlib.nullcontext}
dtypes = lambda module: {p: p.dtype for p in module.parameters()}
kept = {"keep_whole": True, "all_at_once": False, "offload": True, "undivided": [model[0].scale], "dtypes": dtypes}
sharded = FullySharded(model, group, torch.device("cpu"), **kept, **timed)
sharded.gather_together([model[1]])
sharded.gather_together([model])
assert all(p.offload_to_cpu for together in sharded._groups() for p in together.fsdp_params)
part = local_part(model[0].weight).fill_(1)
for last in (False, True):
    with sharded.around_slice(last=last):
        model(torch.ones(1, 3)).sum().backward()
assert local_part(model[0].weight).data_ptr() == part.data_ptr(), "the first passes have moved it"
assert local_part(model[1].bias.grad).tolist() == [2, 2], "slices are not summed"
before = model(torch.ones(1, 3))
sharded.free()
part.zero_()
assert not model(torch.ones(1, 3)).equal(before), "a copy was kept"
reference = weakref.ref(group)
sharded.release()
dist.destroy_process_group()
del group, stage
gc.collect()
assert reference() is None, gc.get_referrers(reference())
"""


@pytest.mark.slow
def test_a_stage_of_a_pipeline_and_a_divided_model() -> None:
    """In a process of their own, because both load the compiler."""
    done = subprocess.run(
        [sys.executable, "-c", FULLY_SHARDED_IMPORT + PIPELINE_STAGE + FULLY_SHARDED],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    ours = [
        parsed(Path(str(compat.__file__)).with_name(name))
        for name in ("torch.py", "backends.py", "process_groups.py", "fully_sharded.py")
    ]
    known = {n.attr for tree in ours for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_private(n.attr)}
    broken = []
    for path in sorted([*ROOT.glob("orchestrator/**/*.py"), *ROOT.glob("jobs/**/*.py")]):
        if "compat" in path.parts:
            continue
        for n in ast.walk(parsed(path)):
            if isinstance(n, ast.ImportFrom) and str(n.module).split(".")[0] == "torch":
                names = [*str(n.module).split("."), *(alias.name for alias in n.names)]
                found = [name for name in names if is_private(name)]
            elif isinstance(n, ast.Attribute) and is_private(n.attr):
                owner = ast.unparse(n.value)
                of_torch = owner.split(".")[0] in ("torch", "nn", "dist") or n.attr in known
                found = [n.attr] if of_torch and owner not in ("self", "cls") else []
            else:
                found = []
            broken += [f"{path.relative_to(ROOT)}, line {n.lineno}: {name}" for name in found]  # type: ignore[attr-defined]
    assert not broken, "give it a name in orchestrator/compat:\n" + "\n".join(broken)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
