"""What a worker delivers besides metrics: samples, evaluations, checkpoints, explanations."""
