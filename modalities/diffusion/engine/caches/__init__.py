"""Step caches: skipping steps of the model by reusing earlier outputs."""
