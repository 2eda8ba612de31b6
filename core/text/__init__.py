"""Tokenizers and what belongs to them. Loads no torch."""
