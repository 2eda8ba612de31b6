"""Custom voices: recordings that models which clone shall imitate."""
