"""Messages and interfaces that cross between the API process and the engine. No torch."""
