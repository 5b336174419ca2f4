"""Launches, and verbs on runs, that are sent to a cluster as jobs."""
