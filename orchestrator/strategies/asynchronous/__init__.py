"""Strategies with shared or served parameters."""
