"""Internals of libraries that this project touches."""
