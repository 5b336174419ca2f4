"""Strategies whose workers update shared or served parameters."""
