"""The batches of a rank."""
