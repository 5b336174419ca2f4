"""The checks on the driver before a run starts."""
