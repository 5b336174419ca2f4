"""A model as stages: what flows between its layers, where it is cut, and how a worker builds its stages."""
