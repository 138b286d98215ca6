"""What a device reaches at most: matrix products, copies within its memory, and from the host. Ours alone."""

import json
import time

import torch
from device import CPU, DEVICE, finish

from accelerate.extensions.plan.ceilings import measured
from accelerate.extensions.reports.device_specs import device_spec

MEGABYTES = 16 if CPU else 1024


def main():
    small = {"side": 512, "copied": 16 << 20} if CPU else {}
    found = measured(device_spec("h200-141gb"), DEVICE, **small)
    figures = {f"matrix products, {name} (TFLOP/s)": rate / 1e12 for name, rate in found.flops.items()}
    figures["memory, read and written (GB/s)"] = found.bandwidth / 1e9
    if not CPU:
        host = torch.ones(MEGABYTES << 18, pin_memory=True)
        host.to(DEVICE)
        finish()
        start = time.perf_counter()
        host.to(DEVICE)
        finish()
        figures["from pinned host memory (GB/s)"] = host.nbytes / (time.perf_counter() - start) / 1e9
        figures["memory in all (GiB)"] = torch.cuda.get_device_properties(DEVICE).total_memory / 2**30
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
