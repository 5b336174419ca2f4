"""What will run where."""
