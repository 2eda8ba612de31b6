"""Generating on several ranks: branches of guidance, and tokens of an image."""
