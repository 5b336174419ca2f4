"""The directory that comes first on ``PYTHONPATH`` when a script in Python starts."""
