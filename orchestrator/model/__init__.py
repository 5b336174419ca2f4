"""A model in parts: which layers it has, where it is cut, and how one worker builds its part."""
