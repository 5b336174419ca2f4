"""Strategies that cut the model into stages."""
