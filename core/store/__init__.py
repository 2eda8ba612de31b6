"""Documents that outlive the request that made them."""
