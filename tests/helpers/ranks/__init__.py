"""Ranks without Ray, and what they do."""
