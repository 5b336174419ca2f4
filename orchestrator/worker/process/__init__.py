"""Settings and services of a worker process."""
