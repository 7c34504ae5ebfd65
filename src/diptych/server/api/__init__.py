"""HTTP: reading requests, answering them."""
