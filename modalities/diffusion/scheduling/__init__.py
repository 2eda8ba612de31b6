"""Scheduling of image steps. Runs in the engine process; loads no torch."""
