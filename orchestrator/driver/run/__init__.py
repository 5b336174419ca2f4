"""One run: its generations, its health, its pauses and recoveries."""
