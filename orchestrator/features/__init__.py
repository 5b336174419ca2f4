"""What hangs on the core by few threads, each in a folder of its own. The core imports none of it by name."""
