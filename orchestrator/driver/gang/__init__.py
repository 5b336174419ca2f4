"""The workers of a run: seats, start, admission of nodes, spares."""
