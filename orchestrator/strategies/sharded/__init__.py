"""Strategies that divide each tensor of the model over workers."""
