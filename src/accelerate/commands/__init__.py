"""The `accelerate` commands; each module is thin and imports what it needs when it runs."""
