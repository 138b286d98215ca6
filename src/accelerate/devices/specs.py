"""What devices and the links between them can do, by their makers: the one table of peak rates.

Rates are those of dense arithmetic. Links count the bytes that one device sends, in one direction.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class Link:
    """What connects ranks.

    Attributes:
        bytes_per_second: that one rank sends, in one direction.
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
_FABRIC = Link("Infinity Fabric", 448 * _G, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html")
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

DEVICES: dict[str, DeviceSpec] = {
    row.name: row
    for row in (
        DeviceSpec(
            "b200-180gb",
            180 * 10**9,
            _flops(2250, 75),
            7.7e12,
            _nvlink(5, 1800),
            f"NVIDIA DGX B200 datasheet, {_NVIDIA}/dgx-b200/",
            words=("B200",),
            workspace=_HOPPER,
        ),
        DeviceSpec(
            "h200-141gb",
            141 * 10**9,
            _flops(989, 67),
            4.8e12,
            _nvlink(4, 900),
            f"NVIDIA H200 datasheet (SXM), {_NVIDIA}/h200/",
            words=("H200",),
            workspace=_HOPPER,
        ),
        DeviceSpec(
            "h100-80gb",
            80 * 10**9,
            _flops(989, 67),
            3.35e12,
            _nvlink(4, 900),
            f"NVIDIA H100 datasheet (SXM), {_NVIDIA}/h100/",
            words=("H100",),
            workspace=_HOPPER,
        ),
        DeviceSpec(
            "a100-80gb",
            80 * 10**9,
            _flops(312, 19.5),
            2.039e12,
            _nvlink(3, 600),
            f"NVIDIA A100 datasheet (SXM, 80 GB), {_NVIDIA}/a100/",
            words=("A100",),
        ),
        DeviceSpec(
            "a100-40gb",
            40 * 10**9,
            _flops(312, 19.5),
            1.555e12,
            _nvlink(3, 600),
            f"NVIDIA A100 datasheet (SXM, 40 GB), {_NVIDIA}/a100/",
        ),
        DeviceSpec(
            "l40s-48gb",
            48 * 10**9,
            _flops(362, 91.6),
            0.864e12,
            _PCIE4,
            f"NVIDIA L40S datasheet, {_NVIDIA}/l40s/",
            words=("L40S",),
        ),
        DeviceSpec(
            "l4-24gb",
            24 * 10**9,
            _flops(121, 30.3),
            0.3e12,
            _PCIE4,
            f"NVIDIA L4 datasheet, {_NVIDIA}/l4/",
            words=("L4",),
        ),
        DeviceSpec(
            "v100-32gb",
            32 * 10**9,
            _flops(125, 15.7, bf16=False),
            0.9e12,
            _nvlink(2, 300),
            f"NVIDIA V100 datasheet (SXM2), {_NVIDIA}/v100/",
            words=("V100",),
        ),
        DeviceSpec(
            "mi300x-192gb",
            192 * 10**9,
            _flops(1307.4, 163.4),
            5.3e12,
            _FABRIC,
            "AMD Instinct MI300X data sheet, https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
            words=("MI300X",),
        ),
    )
}
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
    """Return the peak rate of a device by the name that torch has for it; None if it is not in the table.

    Where the table has no rate for bfloat16 (V100), it is that for float16.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe")
        (989000000000000.0, None)
    """
    words = set(device_name.replace("-", " ").split())
    if words & _OTHER_BOARDS:
        return None
    rows: Iterable[DeviceSpec] = (row for row in DEVICES.values() if words & set(row.words))
    return next((row.flops.get(precision, row.flops["fp16"]) for row in rows), None)
