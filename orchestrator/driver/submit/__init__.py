"""Commands that run as jobs of a cluster, and their restarts."""
