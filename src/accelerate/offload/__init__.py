"""Running models larger than one device: sizes, memory budgets, device maps, placement, loading, offload files.

Read in this order: `sizes` (what a module weighs), `memory` (what devices hold), `waiting`, `planner` and `device_map` (what goes where),
`placement` (moving one tensor), `mapped` and `sources` (checkpoints), `loading` (checkpoint to model), `writer` and `disk` (weights that
stay in files), `weights` (where each is kept), `prefetch` and `lanes` (reading ahead). The public names are in
`accelerate.utils.modeling` and `accelerate.utils.offload`.
"""
