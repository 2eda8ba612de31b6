"""The HTTP layer that all routes share: app factory, auth, limits, SSE, errors, health."""
