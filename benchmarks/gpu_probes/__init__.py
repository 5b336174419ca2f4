"""The questions that ``gpu_quarter.py`` asks a GPU."""
