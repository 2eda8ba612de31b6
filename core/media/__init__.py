"""Untrusted media files: fetching, and decoding in confined processes."""
