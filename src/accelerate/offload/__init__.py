"""Running models larger than one device: sizes, memory budgets, device maps, placement, loading, offload files.

Read in this order: `tensors` (names, ties and bytes), `planner` and `device_map` (what devices hold, what goes where),
`placement` (moving one tensor, quantised ones too), `files` (checkpoints), `store` (weights that are kept elsewhere),
`loading` (checkpoint to model), `weights` (where all of a model's are), `hooks_base`, and `prefetch` (reading ahead).
The public names are in `accelerate.utils.modeling` and `accelerate.utils.offload`.
"""
