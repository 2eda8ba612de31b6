"""Commands as clients of a running server: where it is, which model it has, requests to it."""
