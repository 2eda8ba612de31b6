"""Tokenizers, their limits and their threads. Loads no torch."""
