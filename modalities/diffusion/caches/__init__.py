"""Step caches: when a row need not run the model, and what it takes instead."""
