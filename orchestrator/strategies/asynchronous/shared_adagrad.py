"""Adagrad whose parameters and sums several processes update at once, without a lock."""

from __future__ import annotations

import torch
from torch.optim import Adagrad


@torch.no_grad()
def take_gradients(optimizer: Adagrad) -> None:
    """Make the update of ``optimizer.step()``, which finds no gradients afterwards, except complex ones.

    torch adds the square of a gradient to its sum, and divides by the root of what it reads back. If another process
    has overwritten that with a sum without this gradient, the quotient has no bound: sums begin at zero. Here a process
    divides by the sum that it has computed, so that no quotient is larger than 1.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is None or gradient.is_complex():
                continue
            state, parameter.grad = optimizer.state[parameter], None
            if group["maximize"]:
                gradient = -gradient
            if group["weight_decay"]:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            state["step"] += 1
            rate = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                values = gradient.values()
                squares = values.square()
                roots = (state["sum"].sparse_mask(gradient).values() + squares).sqrt_().add_(group["eps"])
                squares, quotients = (
                    torch.sparse_coo_tensor(gradient.indices(), made, gradient.shape, is_coalesced=True)
                    for made in (squares, values / roots)
                )
                state["sum"].add_(squares)
                parameter.add_(quotients, alpha=-rate)
            else:
                squares = gradient.square()
                roots = (state["sum"] + squares).sqrt_().add_(group["eps"])
                state["sum"].add_(squares)
                parameter.addcdiv_(gradient, roots, value=-rate)
