"""The code of the user: what it must not do, and how it is told."""
