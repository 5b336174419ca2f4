"""Corpora for language models: texts in files, cut into pieces, and encoded to files of tokens."""
