"""Forms a group; then rank 1 does nothing, or fails if told to, and the others wait for it. Says how it was ended."""

import signal
import sys
import time

import torch
import torch.distributed as dist


def end(number, frame):
    if sys.argv[1:] == ["fail-at-stop"] and dist.get_rank() == 1:
        raise OSError("the disk is full")
    print(f"saved at {signal.Signals(number).name}", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
dist.init_process_group("gloo")
dist.broadcast(torch.ones(1), 0)
print("formed", flush=True)
if dist.get_rank() == 1:
    if sys.argv[1:] == ["fail"]:
        raise ValueError(f"told to {sys.argv[1]}")
    time.sleep(600)
dist.all_reduce(torch.ones(1))
