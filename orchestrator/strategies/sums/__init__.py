"""When the gradients of a step are summed: in its backward passes, into shards, or at their end."""
