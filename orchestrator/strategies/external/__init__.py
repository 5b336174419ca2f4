"""Jobs that are programs of the user."""
