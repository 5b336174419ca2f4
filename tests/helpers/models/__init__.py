"""Models of other people, and what becomes of them under each strategy."""
