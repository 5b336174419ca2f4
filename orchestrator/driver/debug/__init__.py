"""A run that trains in the process of the driver."""
