"""Families of vision models, and their configurations: uses transformers without torch."""
