"""Speech in the API process: routes, service, text, voices, containers. Loads no torch."""
