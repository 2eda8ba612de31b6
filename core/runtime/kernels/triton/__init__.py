"""The operations of a step on a GPU, one file each: contract, launcher, kernel, reference."""
