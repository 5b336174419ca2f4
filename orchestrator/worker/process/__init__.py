"""What a worker process needs."""
