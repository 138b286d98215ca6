"""Overlays on data parallelism: the device mesh, and later tensor, context and sequence parallelism over it."""
