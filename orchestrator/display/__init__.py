"""What a person sees: console, panel, report."""
