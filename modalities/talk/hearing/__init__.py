"""The listening side of a conversation: who speaks when, and what was said."""
