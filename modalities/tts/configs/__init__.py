"""Configurations of speech models, read by the API process and the engine. Loads no torch."""
