"""``orchestrator batch-size``: the largest batch that fits, found by runs of a few steps."""
