"""Speech recognition in the API process: routes, service, pipeline, command. No torch."""
