"""The driver's own process, and how it talks to Ray and to the outside."""
