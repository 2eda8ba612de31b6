"""Runs the steps of any model: runners, heads, and the common parts of loaders."""
