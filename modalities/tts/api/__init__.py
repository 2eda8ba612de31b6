"""The API process's side of speech: routes, service, text, voices, containers. Loads no torch."""
