"""Ollama's API: its routes, in front of the same service as chat."""
