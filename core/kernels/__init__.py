"""One file per operation: contract checks, launcher, kernel and torch reference."""
