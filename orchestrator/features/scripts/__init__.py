"""How a worker runs a script of the user in place of the training loop."""
