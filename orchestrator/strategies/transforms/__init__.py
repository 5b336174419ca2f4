"""What changes a model before it is trained, such as a division of its layers over workers."""
