"""What is checked before anything starts."""
