"""Strategies with a whole model on each worker."""
