"""Jobs that tests train."""
