"""What every modality shares: devices, memory, weights, kernels, transport and HTTP.

Imports nothing above itself, and nothing inside it imports `core.http`.
"""
