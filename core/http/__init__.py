"""What every HTTP route shares: app factory, auth, limits, SSE, errors, health."""
