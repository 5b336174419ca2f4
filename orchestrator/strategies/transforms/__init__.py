"""What changes how a model runs, or what of it a worker has: recomputation, compilation, layers over workers."""
