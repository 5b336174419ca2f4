"""What the stages of a pipeline did in a step."""
