"""Texts as vectors: encoder models, and pooled states of decoders."""
