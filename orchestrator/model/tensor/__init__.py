"""Blocks whose linear layers are divided over several workers, and the proof that they then compute the same."""
