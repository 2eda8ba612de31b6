"""Heads that draft: small decoders that read the hidden states of a larger one, their target."""
