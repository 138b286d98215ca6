"""What a run computes in and what it holds: the reports on precision and on memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.diagnostics.table import table
from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.precision import footprint
from accelerate.precision.amp import autocast_of
from accelerate.precision.base import precision
from accelerate.precision.footprint import Piece, short
from accelerate.precision.master import local_part, size
from accelerate.training.memory import (
    MemoryReport,
    MemoryRow,
    measure_activations,
    memory_report,
    tensors_in,
)

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

__all__ = [
    "MemoryReport",
    "MemoryRow",
    "PrecisionReport",
    "PrecisionRow",
    "measure_activations",
    "memory_report",
    "precision_report",
]

_LOW = (torch.float16, torch.bfloat16)
_PURE = (
    "Updates smaller than what the dtype resolves (1/256 of a weight in bfloat16) are lost. For mixed precision with float32 "
    "master weights load the model in float32 and set mixed_precision."
)


@dataclass(frozen=True)
class PrecisionRow:
    """One kind of copy of a model's numbers, in one dtype.

    Attributes:
        copy: What it is, such as ``"trainable parameters"``.
        before: Its dtype when the model came to ``prepare``.
        after: Its dtype now.
        count: Elements of the whole, over all ranks of a shard group; None where nobody counts.
        nbytes: Bytes of the whole.
        local: Bytes on this rank.
    """

    copy: str
    before: str
    after: str
    count: int | None = None
    nbytes: int | None = None
    local: int | None = None


@dataclass(frozen=True)
class PrecisionReport:
    """In which dtype each copy of a model's numbers is; printed, a table.

    Attributes:
        model: The class of the user's model.
        strategy: ``"none"``, ``"ddp"``, ``"fsdp1"``, ``"fsdp2"``, ``"tp"``, or two of them joined by ``" x "``.
        mixed_precision: As the user asked.
        rows: The copies.
        notes: What contradicts what was asked for, or is easily taken for something else.
        warnings: How many of the notes, from the first, are contradictions.
    """

    model: str
    strategy: str
    mixed_precision: str
    rows: tuple[PrecisionRow, ...]
    notes: tuple[str, ...] = ()
    warnings: int = 0

    def dtype_of(self, copy: str) -> str:
        """Return the dtype of a copy as it is now, several joined by a comma; ``"-"`` where there is none.

        Args:
            copy: As in the table.
        """
        return ", ".join(dict.fromkeys(row.after for row in self.rows if row.copy == copy)) or "-"

    def __str__(self) -> str:
        head = ("copy", "before prepare", "now", "elements", "whole", "on this rank")
        body = [
            (
                row.copy,
                row.before,
                row.after,
                "" if row.count is None else f"{row.count:,}",
                "" if row.nbytes is None else size(row.nbytes),
                "" if row.local is None else size(row.local),
            )
            for row in self.rows
        ]
        title = f"{self.model}: strategy {self.strategy}, mixed_precision={self.mixed_precision!r}"
        marks = ["warning" if index < self.warnings else "note" for index in range(len(self.notes))]
        notes = [f"{mark}: {note}" for mark, note in zip(marks, self.notes, strict=True)]
        return "\n".join([title, table(head, body, right=head[3:], rule=True), *notes])


def precision_report(accelerator: "Accelerator", model: nn.Module) -> PrecisionReport:
    """Tell in which dtype each copy of a model's numbers is, before and after ``prepare``. Any rank, alone.

    Gradients and optimizer state are looked at where they exist, so a report after the first step says most; before it
    says in which dtype gradients will come.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The prepared model.

    Returns:
        The report; print it.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        >>> model = accelerator.prepare(nn.Linear(4, 4))
        >>> precision_report(accelerator, model).dtype_of("forward")
        'bfloat16'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"precision_report() got {model!r} ({type(model).__name__}); pass a prepared model.")
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    parts = footprint.pieces(model)
    strategy = _strategy(model, parts)
    held = _held(accelerator, model)
    changed = getattr(inner, "_accelerate_upcast", None)
    loaded = {name: short(dtype) for name, dtype in inner.__dict__.get("_accelerate_loaded", {}).items()}
    rows = [
        *_parameter_rows(parts, loaded),
        *_buffer_rows(model, loaded),
        *_forward_rows(accelerator, model, inner, parts, loaded),
        *_gradient_rows(accelerator, model, strategy, parts),
        *_optimizer_rows(held),
    ]
    alarms = _contradictions(accelerator, model, inner, parts, held)
    facts = []
    if changed:
        facts.append(
            f"prepare() turned {len(changed.before)} trainable parameters into {short(changed.dtype)}, which took "
            f"{size(changed.added)} more on each rank before sharding."
        )
    low = [piece for piece in parts if piece.trainable and piece.dtype in _LOW]
    if low and accelerator.mixed_precision == "no":
        facts.append(f"pure {_names(piece.dtype for piece in low)} training, as the model was loaded. {_PURE}")
    # fully_shard derives a class of the user's.
    kind = type(inner).__bases__[-1] if hasattr(inner, "_get_fsdp_state") else type(inner)
    return PrecisionReport(
        kind.__name__, strategy, accelerator.mixed_precision, tuple(rows), (*alarms, *facts), len(alarms)
    )


def _strategy(model: nn.Module, parts: Sequence[Piece]) -> str:
    found = sorted({piece.strategy for piece in parts if piece.strategy})
    if _find(model, nn.parallel.DistributedDataParallel):
        found.append("ddp")
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    if any(mesh is not None and "tp" in (mesh.mesh_dim_names or ()) for mesh in meshes):
        found.append("tp")
    return " x ".join(found) or "none"


def _find(model: nn.Module, kind: type) -> Any | None:
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def _grouped(items: Iterable[tuple[tuple[str, ...], tuple[int, int, int]]]) -> dict[tuple[str, ...], tuple[int, ...]]:
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for key, numbers in items:
        found[key] = tuple(map(sum, zip(found.get(key, (0, 0, 0)), numbers, strict=True)))
    return found


def _parameter_rows(parts: Sequence[Piece], loaded: dict[str, str]) -> Iterator[PrecisionRow]:
    kinds = {True: "trainable parameters", False: "frozen parameters"}
    sums = _grouped(
        (
            (kinds[piece.trainable], loaded.get(piece.name, short(piece.dtype)), short(piece.dtype)),
            (piece.numel, piece.numel * piece.dtype.itemsize, piece.here * piece.dtype.itemsize),
        )
        for piece in parts
    )
    for key in sorted(sums, key=lambda item: (item[0] != kinds[True], *item)):
        yield PrecisionRow(*key, *sums[key])


def _buffer_rows(model: nn.Module, loaded: dict[str, str]) -> Iterator[PrecisionRow]:
    sums = _grouped(
        (
            (loaded.get(footprint.plain_name(model, name), short(buffer.dtype)), short(buffer.dtype)),
            (buffer.numel(), _nbytes(buffer), _nbytes(local_part(buffer))),
        )
        for name, buffer in model.named_buffers()
    )
    for key, numbers in sorted(sums.items()):
        yield PrecisionRow("buffers", *key, *numbers)


def _autocast_dtype(inner: nn.Module) -> torch.dtype | None:
    """Return the dtype that a model's forward is autocast to, or None."""
    forward = inner.__dict__.get("forward")
    while forward is not None and autocast_of(forward) is None:
        forward = getattr(forward, "forward", None)  # another wrapper of ours
    autocast = autocast_of(forward)
    if autocast is None or autocast.options.get("enabled") is False:
        return None
    return autocast.row.autocast_dtype


def _forward_rows(
    accelerator: "Accelerator", model: nn.Module, inner: nn.Module, parts: Sequence[Piece], loaded: dict[str, str]
) -> Iterator[PrecisionRow]:
    autocast = _autocast_dtype(inner)
    at_rest = ", ".join(sorted({loaded.get(piece.name, short(piece.dtype)) for piece in parts})) or "-"
    handed = _names(piece.compute for piece in parts)
    yield PrecisionRow("forward", at_rest, short(autocast) if autocast else handed)
    layers = _low_layers(accelerator, inner)
    if layers:
        yield PrecisionRow(f"forward of {layers[1]} {layers[0]} layers", at_rest, "float8")
    if any(piece.strategy for piece in parts):
        yield PrecisionRow("gathered parameters", "-", handed)
    yield PrecisionRow("outputs", at_rest, _outputs(model, inner, autocast, handed))


def _outputs(model: nn.Module, inner: nn.Module, autocast: torch.dtype | None, handed: str) -> str:
    for module in (model, inner):  # torch.compile lies around what fully_shard made
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None and state()._mp_policy.output_dtype is not None:
            return short(state()._mp_policy.output_dtype)
    return "float32" if autocast_of(inner.__dict__.get("forward")) is not None else handed


def _low_layers(accelerator: "Accelerator", inner: nn.Module) -> tuple[str, int] | None:
    """Return the library that computes in 8 bits, and how many layers of the model."""
    if not precision(accelerator.mixed_precision).needs_engine:
        return None
    from accelerate.precision.fp8 import ENGINES

    engine = ENGINES.get(accelerator.fp8_backend)
    return (engine.title, engine.converted(inner)) if engine is not None else None


def _gradient_rows(
    accelerator: "Accelerator", model: nn.Module, strategy: str, parts: Sequence[Piece]
) -> Iterator[PrecisionRow]:
    trained = [piece for piece in parts if piece.trainable]
    if not trained:
        return
    there = [p.grad for p in model.parameters() if p.grad is not None]
    seen = _names(gradient.dtype for gradient in there) if there else _names(piece.gradient for piece in trained)
    count, local = sum(piece.numel for piece in trained), sum(_nbytes(local_part(gradient)) for gradient in there)
    whole = sum(piece.numel * piece.gradient.itemsize for piece in trained)
    yield PrecisionRow("gradients", "-", seen, count, whole, local)
    if strategy == "none" or strategy == "tp":
        return
    hook = getattr(accelerator.ddp_handler, "comm_hook", None) if strategy.startswith("ddp") else None
    hook = str(getattr(hook, "value", hook) or "no")
    exchanged = {"fp16": "float16", "bf16": "bfloat16"}.get(hook) or _names(piece.reduce for piece in trained)
    yield PrecisionRow(
        "gradients exchanged", "-", exchanged if hook in ("no", "fp16", "bf16") else f"{exchanged} ({hook})"
    )


def _held(accelerator: "Accelerator", model: nn.Module) -> list[tuple[torch.Tensor, dict[Any, Any]]]:
    """Return the model's parameters that prepared optimizers update, each with its state."""
    own = {id(parameter) for parameter in model.parameters()}
    found = []
    for optimizer in accelerator._optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in own and parameter.requires_grad:
                    found.append((parameter, optimizer.state.get(parameter, {})))
    return found


def _optimizer_rows(held: Sequence[tuple[torch.Tensor, dict[Any, Any]]]) -> Iterator[PrecisionRow]:
    sums = _grouped(
        ((short(parameter.dtype),), (parameter.numel(), _nbytes(parameter), _nbytes(local_part(parameter))))
        for parameter, _ in held
    )
    for (dtype,), numbers in sorted(sums.items()):
        yield PrecisionRow("updated by optimizers", "-", dtype, *numbers)
    # A step counter is a scalar, and says nothing about the precision of the state.
    states = [value for _, state in held for value in tensors_in(state) if value.dim()]
    sums = _grouped(
        ((short(value.dtype),), (value.numel(), _nbytes(value), _nbytes(local_part(value)))) for value in states
    )
    for (dtype,), numbers in sorted(sums.items()):
        yield PrecisionRow("optimizer state", "-", dtype, *numbers)


def _contradictions(
    accelerator: "Accelerator",
    model: nn.Module,
    inner: nn.Module,
    parts: Sequence[Piece],
    held: Sequence[tuple[torch.Tensor, dict[Any, Any]]],
) -> list[str]:
    found = []
    row = precision(accelerator.mixed_precision)
    low = [piece for piece in parts if piece.trainable and piece.dtype in _LOW]
    if low and row.autocast_dtype is not None:
        kinds = _names(piece.dtype for piece in low)
        found.append(
            f"mixed_precision={row.name!r} asked for, but {len(low)} trainable parameters are {kinds}, and optimizers update "
            f"these: pure {kinds} training, without float32 master weights. {_PURE}"
        )
    autocast = _autocast_dtype(inner)
    if row.autocast_dtype is not None and autocast is None:
        found.append(
            f"mixed_precision={row.name!r}, but this model's forward is not autocast: AutocastKwargs(enabled=False), or the "
            "forward was replaced after prepare()."
        )
    policies = {piece.compute for piece in parts if piece.strategy and piece.compute != piece.dtype}
    if autocast is not None and policies - {autocast}:
        found.append(
            f"FSDP hands parameters to forward in {_names(policies)}, and autocast computes in {short(autocast)}. Leave one of "
            "mixed_precision and the plugin's mixed_precision_policy to the other."
        )
    layers = _low_layers(accelerator, inner)
    if layers is not None and not layers[1]:
        found.append(
            f"mixed_precision='fp8', but {layers[0]} computes no layer of this model, which runs in bfloat16."
        )
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    missed = len(trained - {id(parameter) for parameter, _ in held})
    if accelerator._optimizers and missed:
        found.append(
            f"{missed} of {len(trained)} trainable parameters are in no prepared optimizer and stay as they are. If the model was "
            "changed after the optimizer was made, make it afterwards."
        )
    return found


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted({short(dtype) for dtype in dtypes})) or "-"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
