"""What a worker measures: metrics, FLOPs, GPUs, compilation, profiles."""
