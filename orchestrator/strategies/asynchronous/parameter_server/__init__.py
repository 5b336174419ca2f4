"""Parameters on servers."""
