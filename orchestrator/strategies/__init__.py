"""Strategies, which lay a job out over workers: one module for each, found by name through ``registry``."""
