"""What of the model is on a rank: all of it, shards of it that are gathered, or stages."""
