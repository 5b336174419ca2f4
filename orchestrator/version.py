"""The version of the package. ``pyproject.toml`` reads it from here, so this module imports nothing."""

__version__ = "0.1.0"
