"""Typed messages between the API process and the engine process. Never pickle."""
