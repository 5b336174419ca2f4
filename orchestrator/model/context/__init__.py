"""A model of which each rank computes some tokens of every sample."""
