"""The messages between driver and workers, the events of a run, and its metrics."""
