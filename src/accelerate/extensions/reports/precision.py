"""The precision report: in which dtype each copy of a model's numbers is, before and after ``prepare``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accelerate.base.table import Report
from accelerate.config.enums import FP8BackendType
from accelerate.extensions.reports.footprint import Piece, engine_updates, pieces, plain_name, short, zero_stage
from accelerate.extensions.reports.torch_private import output_dtype
from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.precision.amp import autocast_of, precision
from accelerate.precision.master import size
from accelerate.runtime import torch_private
from accelerate.runtime.torch_private import local_part, pytree

_COLUMNS = ("copy", "before prepare", "now", "elements", "whole", "on this rank")
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PrecisionRow:
    """One kind of copy of a model's numbers, in one dtype.

    Attributes:
        before: its dtype when the model came to ``prepare``.
        count: elements of the full tensors, over all ranks of a shard group; None if not counted.
        local: bytes on this rank; `nbytes` are those of the full tensors.
    """

    copy: str
    before: str
    after: str
    count: int | None = None
    nbytes: int = 0
    local: int = 0

    def cells(self) -> list[str]:
        """Return the row as text."""
        sizes = ["", "", ""] if self.count is None else [f"{self.count:,}", size(self.nbytes), size(self.local)]
        return [self.copy, self.before, self.after, *sizes]


@dataclass(frozen=True)
class PrecisionReport(Report):
    """The dtype of each copy of a model's numbers; printed as a table.

    Attributes:
        strategy: ``"none"``, ``"ddp"``, ``"fsdp1"``, ``"fsdp2"``, ``"tp"``, ``"zero0"`` to ``"zero3"``, or two of them joined by ``" x "``.
        warnings: how many of the notes, from the first, contradict the settings.
    """

    model: str = ""
    strategy: str = "none"
    warnings: int = 0

    def dtype_of(self, copy: str) -> str:
        """Return the present dtypes of a copy named as in the table; ``"-"`` where there is none."""
        return ", ".join(dict.fromkeys(row.after for row in self.rows if row.copy == copy)) or "-"


def precision_report(
    model: nn.Module,
    optimizers: Sequence[Any],
    mixed_precision: str,
    fp8_backend: FP8BackendType = FP8BackendType.NO,
    comm_hook: Any = None,
) -> PrecisionReport:
    """Return in which dtype each copy of a model's numbers is; most after the first step. Not a collective."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"precision_report() got {model!r} ({type(model).__name__}); pass a prepared model.")
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    parts = pieces(model)
    strategy = _strategy(model, parts)
    engine = None
    if precision(mixed_precision).needs_engine:
        from accelerate.extensions.fp8.fp8 import ENGINES  # of a run that has this extension

        engine = ENGINES.get(fp8_backend)
    layers = engine.converted(inner) if engine is not None else 0
    stage = zero_stage(model)
    optimized, missed = _list_optimized(model, optimizers) if stage is None else (_held_by_engine(model), 0)
    rows = list(_model_rows(model, inner, parts))
    if layers:
        rows.append(PrecisionRow(f"forward of {layers} {engine.title} layers", "-", "float8"))
    rows += _gradient_rows(model, strategy, parts, comm_hook) if stage is None else _exchanged_by_engine(model)
    updated = _sums("updated by optimizers", (_tensor(parameter) for parameter, _ in optimized))
    states = pytree.tree_leaves([state for _, state in optimized])
    # A step counter is a scalar, and says nothing about the precision of the state.
    updated += _sums("optimizer state", (_tensor(v) for v in states if isinstance(v, torch.Tensor) and v.dim()))
    if stage and optimized:
        # Each rank has a part, filled up to a size that all ranks can divide.
        parted = sum(piece.numel for piece in parts if piece.trainable) / sum(part.numel() for part, _ in optimized)
        updated = [replace(row, count=round(row.count * parted), nbytes=round(row.nbytes * parted)) for row in updated]
    rows += updated
    # Modules with a rule compute without autocast.
    autocast = None if getattr(inner, "_accelerate_rules", None) else _autocast_dtype(inner)
    alarms = _contradictions(mixed_precision, autocast, parts) if stage is None else []
    if engine is not None and not layers:
        alarms.append(
            f"mixed_precision='fp8', but {engine.title} computes no layer of this model: it runs in bfloat16."
        )
    if optimizers and missed:
        alarms.append(
            f"{missed} of {missed + len(optimized)} trainable parameters are in no prepared optimizer and stay as they are. If the model was "
            "changed after the optimizer was made, make it afterwards."
        )
    notes = [f"warning: {alarm}" for alarm in alarms]
    if (changed := getattr(inner, "_accelerate_upcast", None)) is not None:
        notes.append(
            f"note: prepare() turned {len(changed.before)} trainable parameters into float32, which took "
            f"{size(changed.added)} more on each rank before sharding."
        )
    kind = torch_private.shards_own_class(inner)
    title = f"{kind.__name__}: strategy {strategy}, mixed_precision={mixed_precision!r}"
    return PrecisionReport(title, _COLUMNS, tuple(rows), tuple(notes), 3, kind.__name__, strategy, len(alarms))


def _list_optimized(model: nn.Module, optimizers: Sequence[Any]) -> tuple[list[tuple[torch.Tensor, Any]], int]:
    """Return the parameters to train that optimizers have, with their state, and how many none has."""
    trained_ids = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    optimized = [
        (parameter, optimizer.state.get(parameter, {}))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in trained_ids
    ]
    return optimized, len(trained_ids - {id(parameter) for parameter, _ in optimized})


def _held_by_engine(engine: Any) -> list[tuple[torch.Tensor, Any]]:
    state = getattr(engine.optimizer, "state", {})
    return [(part, state.get(part, {})) for part in engine_updates(engine)]


def _exchanged_by_engine(engine: Any) -> Iterator[PrecisionRow]:
    """Yield DeepSpeed's dtypes of gradients, whose buffers come and go within a step: they are in `memory_report`."""
    if engine.optimizer is not None and engine_updates(engine):
        yield PrecisionRow("gradients", "-", short(engine.get_data_types()[1]))
        yield PrecisionRow("gradients exchanged", "-", short(engine.communication_data_type))


def _strategy(model: nn.Module, parts: Sequence[Piece]) -> str:
    if (stage := zero_stage(model)) is not None:
        return f"zero{stage}"
    names = sorted({piece.strategy for piece in parts if piece.strategy})
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        names.append("ddp")
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    if any(mesh is not None and "tp" in (mesh.mesh_dim_names or ()) for mesh in meshes):
        names.append("tp")
    return " x ".join(names) or "none"


def _sums(copy: str, items: Iterable[tuple[str, str, int, int, int]]) -> list[PrecisionRow]:
    """Return a row for each pair of dtypes, with the sums of elements, of bytes and of this rank's bytes."""
    sums: dict[tuple[str, str], list[int]] = {}
    for before, after, *numbers in items:
        totals = sums.get((before, after), [0, 0, 0])
        sums[before, after] = [total + other for total, other in zip(totals, numbers, strict=True)]
    return [PrecisionRow(copy, *dtypes, *numbers) for dtypes, numbers in sorted(sums.items())]


def _tensor(tensor: torch.Tensor, before: str = "-") -> tuple[str, str, int, int, int]:
    count, width = tensor.numel(), tensor.element_size()
    return before, short(tensor.dtype), count, count * width, local_part(tensor).numel() * width


def _model_rows(model: nn.Module, inner: nn.Module, parts: Sequence[Piece]) -> Iterator[PrecisionRow]:
    loaded = {name: short(dtype) for name, dtype in inner.__dict__.get("_accelerate_loaded", {}).items()}
    before = {piece.name: loaded.get(piece.name, short(piece.dtype)) for piece in parts}
    for trainable, copy in ((True, "trainable parameters"), (False, "frozen parameters")):
        chosen = [(piece, piece.dtype.itemsize) for piece in parts if piece.trainable is trainable]
        yield from _sums(
            copy,
            (
                (before[piece.name], short(piece.dtype), piece.numel, piece.numel * width, piece.here * width)
                for piece, width in chosen
            ),
        )
    buffers = [(loaded.get(plain_name(model, name)), buffer) for name, buffer in model.named_buffers()]
    yield from _sums("buffers", (_tensor(buffer, was or short(buffer.dtype)) for was, buffer in buffers))
    at_rest = ", ".join(sorted(set(before.values()))) or "-"
    handed = _names(piece.compute for piece in parts)
    autocast = _autocast_dtype(inner)
    yield PrecisionRow("forward", at_rest, short(autocast) if autocast else handed)
    if any(piece.strategy for piece in parts):
        yield PrecisionRow("gathered parameters", "-", handed)
    outputs = "float32" if autocast_of(inner.__dict__.get("forward")) is not None else handed
    for module in (inner, model):  # torch.compile is around the classes of fully_shard
        if (dtype := output_dtype(module)) is not None:
            outputs = short(dtype)
    yield PrecisionRow("outputs", at_rest, outputs)
    for rule in getattr(inner, "_accelerate_rules", ()):
        yield PrecisionRow(f"{rule.pattern}: {len(rule.modules)} modules", "-", rule.in_words())


def _autocast_dtype(inner: nn.Module) -> torch.dtype | None:
    """Return the dtype that a model's forward is autocast to, or None."""
    forward = inner.__dict__.get("forward")
    while forward is not None and autocast_of(forward) is None:
        forward = getattr(forward, "forward", None)  # another wrapper of ours
    autocast = autocast_of(forward)
    if autocast is None or autocast.options.get("enabled") is False:
        return None
    return autocast.row.autocast_dtype


def _gradient_rows(model: nn.Module, strategy: str, parts: Sequence[Piece], comm_hook: Any) -> Iterator[PrecisionRow]:
    trained = [piece for piece in parts if piece.trainable]
    if not trained:
        return
    present = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    seen = _names(gradient.dtype for gradient in present) if present else _names(piece.gradient for piece in trained)
    whole = sum(piece.numel * piece.gradient.itemsize for piece in trained)
    local = sum(local_part(gradient).numel() * gradient.element_size() for gradient in present)
    yield PrecisionRow("gradients", "-", seen, sum(piece.numel for piece in trained), whole, local)
    if strategy in ("none", "tp"):
        return
    exchanged = _names(piece.reduce for piece in trained)
    if strategy.startswith("ddp"):
        hook = str(getattr(comm_hook, "value", comm_hook))
        exchanged = {"fp16": "float16", "bf16": "bfloat16"}.get(hook, exchanged)
    yield PrecisionRow("gradients exchanged", "-", exchanged)


def _contradictions(mixed_precision: str, autocast: torch.dtype | None, parts: Sequence[Piece]) -> list[str]:
    alarms = []
    low = [piece.dtype for piece in parts if piece.trainable and piece.dtype in _LOW]
    if low and precision(mixed_precision).autocast_dtype is not None:
        alarms.append(
            f"mixed_precision={mixed_precision!r} asked for, but {len(low)} trainable parameters are {_names(low)}: pure "
            f"{_names(low)} training, without float32 master weights, loses small updates. Load the model in float32."
        )
    policies = {piece.compute for piece in parts if piece.strategy and piece.compute != piece.dtype}
    if autocast is not None and policies - {autocast}:
        alarms.append(
            f"FSDP hands parameters to forward in {_names(policies)}, and autocast computes in {short(autocast)}. Leave one of "
            "mixed_precision and the plugin's mixed_precision_policy to the other."
        )
    return alarms


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted({short(dtype) for dtype in dtypes})) or "-"
