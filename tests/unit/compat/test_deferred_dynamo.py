"""Eager training works without the compiler, and code that needs the compiler gets it."""

import subprocess
import sys

import pytest

EAGER = """
import inspect, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from orchestrator.compat import deferred_dynamo
deferred_dynamo.install()
import orchestrator.worker.actor
from orchestrator.strategies import registry
for name in ("single", "ddp", "fsdp"):
    registry.load(name)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Linear(4, 2)
replica = DistributedDataParallel(model)
for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
    optimizer = make(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        optimizer.zero_grad()
        replica(torch.ones(3, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
inspect.getmodule(inspect.currentframe())
del replica  # it holds the group, whose threads must end before the process
dist.destroy_process_group()
del store
assert "torch._dynamo.eval_frame" not in sys.modules, "the compiler was imported"
"""

COMPILED = """
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
optimizer.step()
"""

SUBMODULE = """
import torch._dynamo.config as first
import torch._dynamo
assert torch._dynamo.config is first is sys.modules["torch._dynamo.config"]
assert torch._dynamo.utils.counters is not None
torch._dynamo.reset()
"""

PIPELINES = """
import torch.distributed.pipelining
"""


THEN = f"""
import os
for then in {[COMPILED, SUBMODULE, PIPELINES]}:
    if os.fork() == 0:
        exec(then)
        os._exit(0)
    assert os.wait()[1] == 0, then
"""


@pytest.mark.slow
def test_compiler_is_loaded_only_on_demand() -> None:
    done = subprocess.run([sys.executable, "-c", EAGER + THEN], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
