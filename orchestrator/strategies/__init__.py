"""How a job is laid over workers: one module a strategy, found by name through ``registry``."""
