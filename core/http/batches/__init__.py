"""Requests that are answered in the background, a file of them at a time: `/v1/batches`."""
