"""Running models larger than one device: sizes, memory budgets, device maps, placement, loading, offload files.

Read in this order: `sizes` (what a module weighs), `memory` (what devices hold), `device_map` (what goes where),
`placement` (moving one tensor), `loading` (checkpoint to model), `disk` (weights that stay in files). The public names
are in `accelerate.utils.modeling` and `accelerate.utils.offload`.
"""
