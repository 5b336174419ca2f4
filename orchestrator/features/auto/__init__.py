"""``strategy=auto``: a measuring run, and the choice that follows from it."""
