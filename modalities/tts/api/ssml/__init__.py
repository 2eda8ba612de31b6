"""SSML: text with marks that say how it is spoken."""
