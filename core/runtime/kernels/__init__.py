"""Operations: a torch reference of each, and the CPU kernels in C (`native/`)."""
