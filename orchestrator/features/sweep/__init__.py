"""Several runs of one command: sweeps, searches, runs side by side."""
