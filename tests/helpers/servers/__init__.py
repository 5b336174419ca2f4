"""Servers on this machine, and a browser."""
