"""The door for clients of Anthropic: its routes, in front of the same service as chat."""
