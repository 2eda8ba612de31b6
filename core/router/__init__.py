"""Which of several replicas gets a request, and the client that speaks for all of them."""
