"""How an update is made: norms and clipping of gradients, scaling of losses, averages of weights, confirmation."""
