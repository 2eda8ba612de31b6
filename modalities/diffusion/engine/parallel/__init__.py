"""Parallelism over ranks: by guidance branches, and by tokens of an image."""
