"""What the examples of the documentation need around them; see :mod:`helpers.files.documents`."""
