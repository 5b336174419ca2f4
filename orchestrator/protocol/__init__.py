"""What travels between driver and workers."""
