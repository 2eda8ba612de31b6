"""Everything that the modalities share: runtime, memory, weights, transport and HTTP.

Imports nothing above itself, and nothing inside it imports `core.http`.
"""
