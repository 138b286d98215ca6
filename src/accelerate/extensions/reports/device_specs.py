"""The peak rates of devices and of the links between them, from their makers: the only table of such rates.

Rates are those of dense arithmetic. Links count the bytes that one device sends, in one direction.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class Link:
    """A connection between ranks.

    Attributes:
        bytes_per_second: the rate at which one rank sends, in one direction.
        source: where the number is published.
    """

    name: str
    bytes_per_second: float
    source: str


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device.

    Attributes:
        memory: bytes.
        flops: a second, by mixed_precision: "no" (fp32, or its tensor cores where torch uses them: not counted here), "fp16", "bf16".
        bandwidth: bytes a second of its memory.
        node: the link among the devices of one machine.
        per_node: how many devices a machine usually has.
        source: where the numbers are published.
        workspace: bytes that matrix products keep: two of cuBLAS, for the threads of the forward and of the backward pass
            (https://docs.nvidia.com/cuda/cublas/#cublassetworkspace).
    """

    name: str
    memory: int
    flops: dict[str, float]
    bandwidth: float
    node: Link
    source: str
    per_node: int = 8
    words: tuple[str, ...] = ()
    workspace: int = 2 * (8 << 20)


def _flops(half: float, single: float, bf16: bool = True) -> dict[str, float]:
    return {"no": single * _T, "fp16": half * _T, **({"bf16": half * _T} if bf16 else {})}


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_NVLINK = f"{_NVIDIA}/nvlink/"


def _nvlink(generation: int, total: int) -> Link:
    """Makers state both directions together."""
    return Link(f"NVLink {generation}", total / 2 * _G, _NVLINK)


_PCIE4 = Link("PCIe 4.0 x16", 32 * _G, "https://pcisig.com/specifications")
_MI300X = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_FABRIC = Link("Infinity Fabric", 448 * _G, _MI300X)
_HOPPER = 2 * (32 << 20)
# Between machines, of one device: a network card each.
LINKS = {
    link.name: link
    for link in (
        Link(
            "infiniband-ndr",
            50 * _G,
            "NVIDIA Quantum-2 InfiniBand: 400 Gb/s, https://www.nvidia.com/en-us/networking/quantum2/",
        ),
        Link(
            "infiniband-hdr",
            25 * _G,
            "NVIDIA Quantum InfiniBand: 200 Gb/s, https://www.nvidia.com/en-us/networking/infiniband-switching/",
        ),
        Link("ethernet-100g", 12.5 * _G, "IEEE 802.3bj/bm: 100 Gb/s, https://standards.ieee.org/ieee/802.3/10422/"),
        Link("ethernet-25g", 3.125 * _G, "IEEE 802.3by: 25 Gb/s, https://standards.ieee.org/ieee/802.3/10422/"),
    )
}

USUAL_LINK = "infiniband-ndr"


def _nvidia(
    model: str, size: int, half: float, single: float, bandwidth: float, node: Link, title: str, **more: Any
) -> DeviceSpec:
    """Return a row from gigabytes, TFLOP/s in half and single precision, GB/s of memory, and the datasheet with its page."""
    name, bf16, page = f"{model.lower()}-{size}gb", more.pop("bf16", True), more.pop("page", model.lower())
    source = f"NVIDIA {title}, {_NVIDIA}/{page}/"
    fields = {"words": (model,), **more}
    return DeviceSpec(name, size * 10**9, _flops(half, single, bf16), bandwidth * _G, node, source, **fields)


_ROWS = (
    _nvidia("B200", 180, 2250, 75, 7700, _nvlink(5, 1800), "DGX B200 datasheet", page="dgx-b200", workspace=_HOPPER),
    _nvidia("H200", 141, 989, 67, 4800, _nvlink(4, 900), "H200 datasheet (SXM)", workspace=_HOPPER),
    _nvidia("H100", 80, 989, 67, 3350, _nvlink(4, 900), "H100 datasheet (SXM)", workspace=_HOPPER),
    _nvidia("A100", 80, 312, 19.5, 2039, _nvlink(3, 600), "A100 datasheet (SXM, 80 GB)"),
    _nvidia("A100", 40, 312, 19.5, 1555, _nvlink(3, 600), "A100 datasheet (SXM, 40 GB)", words=()),
    _nvidia("L40S", 48, 362, 91.6, 864, _PCIE4, "L40S datasheet"),
    _nvidia("L4", 24, 121, 30.3, 300, _PCIE4, "L4 datasheet"),
    _nvidia("V100", 32, 125, 15.7, 900, _nvlink(2, 300), "V100 datasheet (SXM2)", bf16=False),
    DeviceSpec(
        "mi300x-192gb",
        192 * 10**9,
        _flops(1307.4, 163.4),
        5.3e12,
        _FABRIC,
        f"AMD Instinct MI300X data sheet, {_MI300X}",
        words=("MI300X",),
    ),
)
DEVICES: dict[str, DeviceSpec] = {row.name: row for row in _ROWS}
# Boards of the same name that are slower than the rows above.
_OTHER_BOARDS = {"PCIe", "NVL"}


def device_spec(name: str) -> DeviceSpec:
    """Return the row of a device.

    Args:
        name: such as "h100-80gb"; upper and lower case are the same.

    Raises:
        ValueError: there is no such row; the message has the known ones.

    Example:
        >>> device_spec("h100-80gb").memory
        80000000000
    """
    row = DEVICES.get(name.lower())
    if row is None:
        raise ValueError(f"The device {name!r} is not in the table; choose one of {', '.join(DEVICES)}.")
    return row


def link(name: str) -> Link:
    """Return the row of a link between machines; ValueError, with the known names, if there is none."""
    if name not in LINKS:
        raise ValueError(f"The link {name!r} is not in the table; choose one of {', '.join(LINKS)}.")
    return LINKS[name]


def peak_flops(device_name: str, precision: str = "bf16") -> float | None:
    """Return the peak rate of a device by torch's name of it; None if it is not in the table.

    If the table has no rate for bfloat16 (V100), it is the one for float16.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe")
        (989000000000000.0, None)
    """
    words = set(device_name.replace("-", " ").split())
    if words & _OTHER_BOARDS:
        return None
    rows: Iterable[DeviceSpec] = (row for row in DEVICES.values() if words & set(row.words))
    return next((row.flops.get(precision, row.flops["fp16"]) for row in rows), None)
