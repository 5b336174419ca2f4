"""Files of this repository that tests read."""
