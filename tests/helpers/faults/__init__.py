"""What runs promise under faults: the layouts, the table of faults, and the check of a run against its row."""
