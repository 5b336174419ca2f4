"""The code, packages and variables that workers get."""
