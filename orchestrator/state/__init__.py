"""Training state: snapshots, checkpoints on disk, and transport between ranks."""
