"""The strategy that leaves the training to a program of the user."""
