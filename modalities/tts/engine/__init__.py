"""The engine process's side of speech: models, codecs and their runner. Uses torch."""
