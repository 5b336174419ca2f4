"""The strategies that are products of the dimensions of a mesh: their names, keys and layouts."""
