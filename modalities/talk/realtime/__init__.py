"""OpenAI's Realtime API: its events, the state of a session, and its WebSocket route."""
