"""Resumable bulk runs over rows of files, in this process or on a cluster."""
