"""Several engines behind one address, on Ray Serve.

Every start imports `plan`; the other modules import Ray and are loaded only with replicas.
"""
