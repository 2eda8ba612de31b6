"""Messages and interfaces between the API process and the engine. No torch."""
