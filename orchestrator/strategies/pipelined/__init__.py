"""Strategies that cut the model into stages and pass micro-batches through them."""
