"""The files that a run leaves on disk."""
