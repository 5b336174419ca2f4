"""What every strategy has in common with plain torch."""
