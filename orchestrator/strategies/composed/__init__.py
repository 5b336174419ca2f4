"""The strategy whose mesh is any product of dimensions."""
