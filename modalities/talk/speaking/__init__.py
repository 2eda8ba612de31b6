"""Answers that are spoken while they are written."""
