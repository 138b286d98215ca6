"""How batches reach the processes: samplers that shard, and loaders that place.

`accelerate.data_loader` is the public front of this package.
"""
