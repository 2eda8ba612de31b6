"""The app with Ollama's API, in front of a made-up engine."""

from support.other_apis import (
    app,
    client,
    engine,
    idle_app,
    shared_engine,
    thinker,
    thinking_app,
)

__all__ = ["app", "client", "engine", "idle_app", "shared_engine", "thinker", "thinking_app"]
