"""The door for clients of Ollama: its routes, in front of the same service as chat."""
