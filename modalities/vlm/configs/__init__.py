"""Families of models that see, and their configurations: transformers without torch."""
