"""What `accelerate estimate-memory` is made of: what a model consists of, how that is found out, and the arithmetic."""
