"""Configuration: the schema, and how the words of the command line become it."""
