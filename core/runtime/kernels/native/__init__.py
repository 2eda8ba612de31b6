"""CPU kernels in C, compiled on first use: sources, build and calls."""
