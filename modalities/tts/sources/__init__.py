"""Speech models that have short names: where they are fetched, how they are converted."""
