"""How batches reach the processes: samplers that shard, loaders that place, and the dispatcher that sends.

`accelerate.data_loader` is the public front of this package.
"""
