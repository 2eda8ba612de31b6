"""Storage of documents that outlive the request that created them."""
