"""Running models larger than one device: sizes, memory budgets, device maps, placement, loading, offload files.

Read in this order: `sizes` (what a module weighs, what devices hold), `tensors` (names and ties), `planner` and `device_map` (what goes
where), `placement` and `quantized` (moving one tensor), `files` (checkpoints), `store` (weights that are kept elsewhere), `loading`
(checkpoint to model), `weights` (where all of a model's are), `hooks_base`, and `prefetch` (reading ahead). The public names are in
`accelerate.utils.modeling` and `accelerate.utils.offload`.
"""
