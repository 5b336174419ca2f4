"""What runs left behind."""
