"""Whisper: its network, features and decoding."""
