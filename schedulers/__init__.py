"""Which step runs next: pure policy over plain data. Imports no torch and no HTTP."""
