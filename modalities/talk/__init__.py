"""Spoken conversation: chat, recognition and speech composed. It has no model of its own."""
