"""Tiers of the prefix cache below the device: host memory and disk."""
