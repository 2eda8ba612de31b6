"""Helpers for any process: threads, logs, metrics, memory of the process, files. No torch."""
