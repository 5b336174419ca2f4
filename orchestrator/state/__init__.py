"""Training state: snapshots, checkpoints, transport between ranks."""
