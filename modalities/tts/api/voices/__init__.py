"""Custom voices: recordings for models that imitate."""
