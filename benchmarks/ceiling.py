"""One pinned one-thread copy of a small training step: ``ceiling.py SECONDS CORE`` prints its steps per second.

It says ``ready`` when everything is loaded and waits for a line before it starts to count.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


def main() -> None:
    seconds, core = float(sys.argv[1]), int(sys.argv[2])
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    inputs, target = torch.randn(64, 64), torch.randint(10, (64,))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(inputs), target).backward()

    for _ in range(20):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
    print(steps / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
