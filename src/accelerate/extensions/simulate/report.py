"""The report of a simulated run: the observations of one rank, as JSON and as text."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.base.table import size_text, table
from accelerate.data.reading import Reading
from accelerate.extensions.data_plan import counting
from accelerate.extensions.data_plan.plan import DataPlan
from accelerate.extensions.reports import device_specs
from accelerate.extensions.reports.collectives import EVERYONE, Collective
from accelerate.extensions.reports.estimator import Fleet, Transfer, step_time
from accelerate.extensions.simulate.simulated import SimulatedRun
from accelerate.runtime.run import Run
from accelerate.strategies import mesh as meshes
from accelerate.strategies.registry import resolve

_MOST = 5
_UNSEEN = "Masks and positions of shared sequences are not looked at: rows count as one document each."


class Facts:
    """The observations of a simulated rank.

    Attributes:
        steps: finished optimizer steps.
        ended: how the program ended.
        names: of modules of prepared models.
    """

    def __init__(self, run: SimulatedRun, shapes_only: bool, device: str | None = None) -> None:
        self.run, self.shapes_only = run, shapes_only
        self._device = None if device is None else device_specs.device_spec(device)
        self.steps, self.ended = 0, "the program came to its end"
        self.names: dict[nn.Module, str] = {}
        self._setting: dict[str, Any] = {}
        self._prepared: dict[str, list[dict[str, Any]]] = {"layout": [], "data": [], "uneven": []}
        self._steps: dict[str, dict[str, Any]] = {"first_step": {}, "step": {}}
        self._seen: tuple[int, ...] = ()

    def look(self, accelerator: Run, forwards: int) -> None:
        """Note the prepared objects of an Accelerator if they are new, and the accumulation from the forward passes of a step."""
        models, loaders = accelerator._models, accelerator._dataloaders
        seen = tuple(map(id, (*models, *loaders)))
        if seen == self._seen:
            return
        self._seen = seen
        self.names = {module: name for model in models for name, module in model.named_modules()}
        accumulation = forwards or accelerator.gradient_accumulation_steps  # a program may accumulate itself
        layout = accelerator.parallelism_config
        if layout is not None and layout.cp_size * layout.sp_size > 1:
            self.run.notes[_UNSEEN] = None
        self._setting = {
            "strategy": resolve(accelerator.state).name,
            "mixed_precision": accelerator.mixed_precision,
            "batches_a_step": accumulation,
            "models": [type(model).__name__ for model in models],
        }
        readings = [getattr(loader, "_reading", None) for loader in loaders]
        plans = [counting.plan(reading) for reading in readings if isinstance(reading, Reading)]
        self._prepared = {
            "layout": list(_groups(accelerator.torch_device_mesh)),
            "data": [_data(plan, accumulation) for plan in plans],
            "uneven": [line for model in models for line in _uneven(model)],
        }

    def step(self, number: int, calls: Sequence[Collective], kinds: dict[str, int], modules: dict[str, int]) -> None:
        """Add a step: the first one with everything before it, the last one as an example of the others; number 0 is no step."""
        self._steps["first_step" if number < 2 else "step"] = {
            "collectives": [asdict(call) for call in calls],
            "memory": {"peak": sum(kinds.values()), "kinds": kinds, "modules": _largest(modules)},
        }

    def estimate(self, flops: Mapping[str, int], extents: Mapping[str, tuple[int, int]]) -> None:
        """Add the duration on the device to the last step, if a device was named.

        `flops` are its operations by precision. `extents` have each group's number of ranks, and the number between neighbours.
        """
        step = self._steps["step"] or self._steps["first_step"]
        if self._device is None:
            return
        ranks = self.run.ranks
        fleet = Fleet(
            self._device, ranks.local_world_size or ranks.world_size, device_specs.link(device_specs.USUAL_LINK)
        )
        calls = [call for call in step["collectives"] if call["bytes"]]
        sent = [Transfer(call["group"], call["kind"], *extents[call["group"]], call["bytes"]) for call in calls]
        time = step_time(fleet.computing(flops), sent, fleet)
        step["estimate"] = {
            "device": self._device.name,
            "memory": self._device.memory,
            "flops": sum(flops.values()),
            "seconds": time.total,
            **asdict(time),
            "efficiency": fleet.efficiency,
            "overlap": fleet.overlap,
            "links": [self._device.node.name, *[fleet.between.name] * any(map(fleet.crosses, sent))],
        }

    def as_json(self) -> dict[str, Any]:
        """Return the facts."""
        ranks = self.run.ranks
        local = ranks.local_world_size or 1
        return {
            "run": {
                "machines": ranks.world_size // local,
                "processes": local,
                "ranks": ranks.world_size,
                "rank": ranks.rank,
                "steps": self.steps,
                "ended": self.ended,
                "shapes_only": self.shapes_only,
                "torch": torch.__version__,
                **self._setting,
            },
            **self._prepared,
            **self._steps,
            "checkpoints": [asdict(save) for save in self.run.saves],
            "loads": self.run.loads,
            "notes": list(self.run.notes),
            "warnings": list(self.run.warnings),
        }


def _largest(modules: dict[str, int]) -> list[dict[str, Any]]:
    return [{"module": name, "bytes": size} for name, size in Counter(modules).most_common(_MOST) if size]


def _groups(mesh: Any | None) -> Iterator[dict[str, Any]]:
    """Yield the dimensions of a mesh with the ranks that this one meets in each."""
    if mesh is None:
        yield {"group": EVERYONE, "size": dist.get_world_size(), "ranks": f"0-{dist.get_world_size() - 1}"}
        return
    for name in mesh.mesh_dim_names or ():
        part = meshes.submesh(mesh, name)
        ranks = dist.get_process_group_ranks(part.get_group())
        yield {"group": name, "size": len(ranks), "ranks": _spans(ranks)}


def _spans(ranks: Sequence[int]) -> str:
    """Write ranks down that have one distance, as those of a dimension of a mesh have."""
    if len(ranks) < 3:
        return ", ".join(map(str, ranks))
    distance = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" if distance == 1 else f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"


def _data(plan: DataPlan, accumulation: int) -> dict[str, Any]:
    shard, total = plan.own, plan.total_batch_size
    return {
        **{name: getattr(plan, name) for name in ("kind", "reading", "samples", "duplicates", "dropped")},
        "dataset": plan.dataset_length,
        "batch": plan.batch_size,
        "global_batch": None if total is None else total * accumulation,
        "batches": shard.batches,
        "steps": None if shard.batches is None else -(-shard.batches // accumulation),
        "shard": shard.index,
        "shards": len(plan.shards),
        "own_samples": shard.samples,
        "own_duplicates": shard.duplicates,
        "read": shard.read,
    }


def _uneven(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the parameters whose sharded dimension the ranks of a group do not divide."""
    for name, parameter in model.named_parameters():
        placements = getattr(parameter, "placements", ())
        for dim, placement in enumerate(placements):
            count, along = parameter.device_mesh.size(dim), getattr(placement, "dim", None)
            if along is not None and parameter.shape[along] % count:
                yield {"parameter": name, "shape": list(parameter.shape), "dimension": along, "ranks": count}


# -- as text -------------------------------------------------------------------------------------------------------------


def text_of(report: dict[str, Any]) -> str:
    """Return the report as text, of what `Facts.as_json` returned."""
    run = report["run"]
    lines = [
        f"Simulated: rank {run['rank']} of {run['ranks']} ({run['machines']} machines x {run['processes']} processes), "
        f"{run['steps']} optimizer steps; {run['ended']}."
    ]
    if "strategy" in run:
        models = ", ".join(run["models"]) or "no model"
        lines += [f"{run['strategy']}, mixed_precision {run['mixed_precision']}: {models}."]
    lines += ["", *_section("Layout", report["layout"])]
    for number, plan in enumerate(report["data"]):
        lines += ["", f"Data of loader {number}", *_plan_lines(plan)]
    step = report["step"] or report["first_step"]
    if step:
        lines += ["", *_memory_lines(step["memory"], "a step" if report["step"] else "the run")]
    lines += ["", *_estimate_lines(step["estimate"], step["memory"]["peak"])] if step.get("estimate") else []
    for title, part in (
        ("Collectives of a step", report["step"]),
        ("Collectives until the end of the first step", report["first_step"]),
    ):
        if part and part["collectives"]:
            lines += ["", *_section(title, part["collectives"])]
    for save in report["checkpoints"]:
        total = size_text(sum(save["files"].values()))
        lines += ["", f"Checkpoint {save['location']}: this rank writes {total} in {len(save['files'])} files"]
        lines += [
            f"  {name}  {size_text(size)}"
            for name, size in sorted(save["files"].items(), key=lambda item: -item[1])[:_MOST]
        ]
    lines += ["", *(f"Would load {location}" for location in report["loads"])] if report["loads"] else []
    lines += ["", *_uneven_lines(report["uneven"])] if report["uneven"] else []
    lines += [f"{kind}: {text}" for kind in ("warning", "note") for text in report[f"{kind}s"]]
    return "\n".join(lines)


def _section(title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a title and a table of rows of the report, whose keys are the headings; nothing without rows."""
    cells = [[size_text(cell) if key == "bytes" else str(cell) for key, cell in row.items()] for row in rows]
    return [title, table(list(rows[0]), cells, ("size", "count", "bytes"))] if rows else []


def _plan_lines(plan: dict[str, Any]) -> list[str]:
    shown = {name: "unknown" if value is None else value for name, value in plan.items()}
    reads = "an unknown part" if plan["read"] is None else f"{100 * plan['read']:.3g}%"
    return [
        f"  {shown['kind']}, {shown['dataset']} samples: {shown['samples']} used, {shown['duplicates']} repeated to fill batches, "
        f"{shown['dropped']} dropped",
        f"  {shown['steps']} optimizer steps an epoch of {shown['global_batch']} samples; {shown['batches']} batches of {shown['batch']} a rank",
        f"  this rank: shard {shown['shard']} of {shown['shards']}, {shown['own_samples']} samples and {shown['own_duplicates']} repeated; "
        f"it reads {reads} of the data ({shown['reading']})",
    ]


def _memory_lines(memory: dict[str, Any], of: str) -> list[str]:
    title = f"Memory of this rank at the peak of {of}: {size_text(memory['peak'])} in tensors"
    kinds = [{"what": name, "bytes": size} for name, size in memory["kinds"].items()]
    modules = [{**row, "module": row["module"] or "(the model)"} for row in memory["modules"]]
    return [*_section(title, kinds), *_section("of it in the largest modules", modules)]


def _estimate_lines(estimate: dict[str, Any], peak: int) -> list[str]:
    return [
        f"Estimated on {estimate['device']}: {estimate['seconds']:.3g} s a step, of which {estimate['arithmetic']:.3g} s compute, "
        f"{estimate['waiting']:.3g} s wait for exchanges within layers, and {estimate['exposed']:.3g} s for others that are not hidden",
        f"  {estimate['flops'] / 1e12:.3g} TFLOP at {estimate['efficiency']:.0%} of the peak rate; {' and '.join(estimate['links'])}; "
        f"{estimate['overlap']:.0%} of the computing hides exchanges of data parallelism",
        f"  {peak / estimate['memory']:.1%} of the device's {size_text(estimate['memory'])}, without its context and what allocators round up",
    ]


def _uneven_lines(uneven: Sequence[dict[str, Any]]) -> list[str]:
    first = uneven[0]
    example = f"{first['parameter']} {first['shape']} over {first['ranks']} ranks along dimension {first['dimension']}"
    return [f"{len(uneven)} parameters do not divide evenly, so some ranks hold less, or nothing: {example}."]
