"""Everything in core that uses torch: devices, kernels, layers, decoders, sampling, runners."""
