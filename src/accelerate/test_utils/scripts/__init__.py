"""Scripts that tests and `accelerate test` launch."""
