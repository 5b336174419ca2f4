"""The datasets of a job, and whether a batch can be divided."""
