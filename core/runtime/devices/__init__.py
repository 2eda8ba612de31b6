"""Devices: what they can do, their streams and copies, and the group of ranks."""
