"""What users see of a run: console, panel, report, comparison."""
