"""Rank 0 waits for rank 1 as NCCL does, which uses the CPU. Rank 1 does something else, which does too."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("formed", flush=True)
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    while not work.is_completed():
        pass
while True:
    pass
