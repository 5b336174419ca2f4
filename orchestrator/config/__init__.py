"""Configuration: the schema, and how command-line overrides become instances of it."""
