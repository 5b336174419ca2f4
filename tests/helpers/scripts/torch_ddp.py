"""DistributedDataParallel under torchrun, as the tutorials of PyTorch have it. Fails if told to."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--fail-at", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    torch.manual_seed(rank)
    for step in range(1, 11):
        optimizer.zero_grad()
        loss = loss_fn(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        if step == args.fail_at and rank == 1 and attempt == 0:
            raise ValueError(f"told to fail at step {step}")
    print(f"rank {rank} of {dist.get_world_size()}: loss {loss.item():.6f}, lr {args.lr}, attempt {attempt}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
