"""What it costs to load a model of many blocks, to keep most of them on disk, and to run it. One process.

`make` writes the checkpoints that the others read: blocks of a linear layer up, one down and a norm, one file for each.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import compute_module_sizes

torch.set_grad_enabled(False)
BLOCKS, ON_DISK = 24, 20
# So many rows take about as long to compute, on one thread, as the bytes take to be read from a disk.
MANY = 32
# A hidden layer of four times the width, as transformers have it.
FACTOR = 4
PAGE = os.sysconf("SC_PAGE_SIZE")
_MADV_DONTNEED = 4
# Prints the most anonymous memory of a process, in KiB, when its stdin is closed.
_WATCH = """
import select, sys
most = 0
print("ready", flush=True)
while not select.select([0], [], [], 0.01)[0]:
    with open(f"/proc/{sys.argv[1]}/status") as file:
        most = max(most, int(file.read().split("RssAnon:")[1].split()[0]))
print(most, flush=True)
"""


# -- the model and its files ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer without attention: nearly all of its bytes are two matrices."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, FACTOR * width)
        self.down = nn.Linear(FACTOR * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks in a row."""

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def width_of(megabytes):
    return int((megabytes * 2**20 / 4 / BLOCKS / (2 * FACTOR)) ** 0.5) // 8 * 8


def empty(megabytes):
    with init_empty_weights():
        return Model(width_of(megabytes)).eval()


def rows(megabytes, count=1):
    return torch.linspace(-1, 1, width_of(megabytes)).repeat(count, 1)


def shard(folder, number):
    return Path(folder, f"model-{number + 1:05}-of-{BLOCKS:05}.safetensors")


def make(folder, megabytes):
    """Write the checkpoint twice: in float32, and in bfloat16 next to it."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    block = Block(width_of(megabytes))
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        target, weight_map = Path(folder, name), {}
        target.mkdir(parents=True)
        for number in range(BLOCKS):
            tensors = {f"blocks.{number}.{key}": value.to(dtype) for key, value in block.state_dict().items()}
            save_file(tensors, shard(target, number), metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, shard(target, number).name)
        content = {"metadata": {}, "weight_map": weight_map}
        Path(target, "model.safetensors.index.json").write_text(json.dumps(content))
    os.sync()
    return {"written (MB)": size_of(folder)}


def size_of(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / 2**20


def on_disk_files(checkpoint, offload):
    """The files that weights on disk are read from: shards, or what was written."""
    return [shard(checkpoint, number) for number in range(BLOCKS - ON_DISK, BLOCKS)] + list(Path(offload).rglob("*"))


# -- the page cache, memory, lines ---------------------------------------------------------------------------------------


def warm(files):
    """Have the page cache hold files."""
    buffer = bytearray(2**22)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cold(files):
    """Drop files from the page cache, and from the page tables of this process, which would keep them there."""
    gc.collect()
    os.sync()
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = {str(Path(path).resolve()) for path in files}
    for line in Path("/proc/self/maps").read_text().splitlines():
        place = line.split(maxsplit=5)
        if len(place) == 6 and place[5] in wanted:
            start, end = (int(number, 16) for number in place[0].split("-"))
            # Of a mapping nobody has written to, nothing is lost: it is read again.
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
    for path in wanted:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    left = cached(wanted)
    if left > 0.05:
        print(f"{left:.0%} of the files are still in the page cache", file=sys.__stderr__)


def cached(files):
    """Return which part of files the page cache holds."""
    import mmap

    libc = ctypes.CDLL(None)
    held = pages = 0
    for path in files:
        size = os.path.getsize(path)
        if not size:
            continue
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view,
        ):
            flags = (ctypes.c_ubyte * -(-size // PAGE))()
            start = ctypes.c_char.from_buffer(view)
            libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags)
            del start
            held, pages = held + sum(flag & 1 for flag in flags), pages + len(flags)
    return held / max(pages, 1)


class Memory:
    """How much more memory a process takes at its peak: all of it, and what is no page of a file. In MB."""

    def __enter__(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        self._before = self._status()
        # Another process, because a thread waits while the interpreter is held.
        watch = [sys.executable, "-S", "-c", _WATCH, str(os.getpid())]
        self._watch = subprocess.Popen(
            watch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._watch.stdout.readline()
        return self

    def __exit__(self, *error):
        anonymous = int(self._watch.communicate()[0])
        self.peak = (self._status()["VmHWM"] - self._before["VmRSS"]) / 2**10
        self.anonymous = (max(anonymous, self._status()["RssAnon"]) - self._before["RssAnon"]) / 2**10

    @staticmethod
    def _status():
        found = re.findall(r"(VmHWM|VmRSS|RssAnon):\s+(\d+)", Path("/proc/self/status").read_text())
        return {name: int(number) for name, number in found}


@contextmanager
def counted_lines(found):
    """Count what is printed to stderr; a progress bar that is drawn again is a line each time."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode(errors="replace")
            found.append(sum(bool(line.strip()) for line in text.splitlines()))


def clock(task):
    gc.collect()
    start = time.perf_counter()
    result = task()
    return time.perf_counter() - start, result


# -- what is measured ----------------------------------------------------------------------------------------------------


def load_to_cpu(folder, megabytes, cold_cache):
    """Load all of it to the CPU, and run it twice."""
    checkpoint, files = Path(folder, "float32"), [shard(Path(folder, "float32"), n) for n in range(BLOCKS)]
    model, x = empty(megabytes), rows(megabytes)
    (cold if cold_cache else warm)(files)
    with Memory() as memory:
        loaded, model = clock(lambda: load_checkpoint_and_dispatch(model, str(checkpoint), device_map={"": "cpu"}))
        first, _ = clock(lambda: model(x))
        second, _ = clock(lambda: model(x))
    figures = {"load (s)": loaded, "first forward (s)": first, "load + first forward (s)": loaded + first}
    if not cold_cache:
        total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20
        figures |= {"second forward (s)": second, "peak memory beyond the model (MB)": memory.peak - total}
        figures |= {"peak anonymous memory (MB)": memory.anonymous}
    return figures


def offload_to_disk(folder, megabytes, cold_cache, dtype="float32"):
    """Have most blocks on disk, and run the model twice."""
    checkpoint, model, x = Path(folder, dtype), empty(megabytes), rows(megabytes)
    device_map = {f"blocks.{number}": "cpu" if number < BLOCKS - ON_DISK else "disk" for number in range(BLOCKS)}
    options = {"dtype": torch.float32} if dtype != "float32" else {}
    prepare = cold if cold_cache else warm
    prepare([shard(checkpoint, number) for number in range(BLOCKS)])
    lines, forwards = [], []
    with tempfile.TemporaryDirectory(dir=folder) as offload, Memory() as memory:
        with counted_lines(lines):
            loaded, model = clock(
                lambda: load_checkpoint_and_dispatch(
                    model, str(checkpoint), device_map=device_map, offload_folder=offload, **options
                )
            )
        written = size_of(offload)
        for given in (x, x, rows(megabytes, MANY))[: 3 if cold_cache else 2]:
            prepare(path for path in on_disk_files(checkpoint, offload) if path.is_file())
            with counted_lines(lines):
                forwards.append(clock(lambda given=given: model(given))[0])
    figures = {"load (s)": loaded, "first forward (s)": forwards[0], "second forward (s)": forwards[1]}
    if cold_cache:
        figures[f"third forward, {MANY} rows (s)"] = forwards[2]
    elif dtype == "float32":
        figures |= {"written (MB)": written, "lines on stderr": sum(lines)}
        figures |= {"peak memory (MB)": memory.peak, "peak anonymous memory (MB)": memory.anonymous}
    return figures


def limits(folder, megabytes):
    """The bytes' own limit: read the blocks on disk once into a buffer of a block; and the model without offloading."""
    from safetensors.torch import load_file

    checkpoint = Path(folder, "float32")
    files = [shard(checkpoint, number) for number in range(BLOCKS - ON_DISK, BLOCKS)]
    buffer = memoryview(bytearray(max(path.stat().st_size for path in files)))

    def read():
        for path in files:
            with open(path, "rb", buffering=0) as file:
                start = 0
                while got := file.readinto(buffer[start:]):
                    start += got

    spent = []
    for _ in range(3):
        cold(files)
        spent.append(clock(read)[0])
    once_cold = statistics.median(spent)
    once_warm = statistics.median(clock(read)[0] for _ in range(5))
    model = Model(width_of(megabytes)).eval()
    for number in range(BLOCKS):
        model.load_state_dict(load_file(shard(checkpoint, number)), strict=False)
    plain = {}
    for count in (1, MANY):
        x = rows(megabytes, count)
        model(x)
        plain[count] = statistics.median(clock(lambda x=x: model(x))[0] for _ in range(3))
    return {
        "reading the bytes once, warm (s)": once_warm,
        "reading the bytes once, cold (s)": once_cold,
        "forward, not offloaded (s)": plain[1],
        f"forward of {MANY} rows, not offloaded (s)": plain[MANY],
    }


class Tiny(nn.Module):
    """A module that does nothing, so that what is left is the call and the hook."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x


class Row(nn.Module):
    """Tiny modules in groups."""

    def __init__(self, groups, each):
        super().__init__()
        self.groups = nn.ModuleList(nn.ModuleList(Tiny() for _ in range(each)) for _ in range(groups))

    def forward(self, x):
        for group in self.groups:
            for module in group:
                x = module(x)
        return x


def hooks(repeats=7):
    """What a hook adds to the call of a module."""
    groups, each, calls = 20, 10, 20
    x = torch.ones(1)
    blocks = {f"groups.{group}.{number}": "cpu" for group in range(groups) for number in range(each)}
    kinds = {
        "one device": ({"": "cpu"}, {"force_hooks": True}),
        "a device for each block": (blocks, {"force_hooks": True}),
        "weights on disk": (dict.fromkeys(blocks, "disk"), {}),
    }
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, (device_map, options) in kinds.items():
            if "disk" in kind:
                options = {"offload_dir": folder}
            plain, hooked = Row(groups, each), dispatch_model(Row(groups, each), device_map, **options)
            count = sum(hasattr(module, "_hf_hook") for module in hooked.modules())
            times = {"plain": [], "hooked": []}
            for _ in range(repeats):
                for name, model in (("plain", plain), ("hooked", hooked)):
                    model(x)
                    times[name].append(clock(lambda model=model: [model(x) for _ in range(calls)])[0] / calls)
            spent = statistics.median(times["hooked"]) - statistics.median(times["plain"])
            figures[f"hook, {kind} (us a call)"] = spent / count * 1e6
    return figures


def growth(repeats=2):
    """Seconds for models of so many modules: sizes, a device map over two devices, dispatch."""
    figures = {}
    for modules in (100, 2500, 5000, 10000):  # the first takes what is imported late
        groups, each = modules // 10, 9  # nine modules and the list that holds them
        size = groups * each * 4
        budgets = {"cpu": size // 2, "disk": size}
        device_map = {f"groups.{number}": "cpu" for number in range(groups)}
        times = {"compute_module_sizes": [], "infer_auto_device_map": [], "dispatch_model": []}
        for _ in range(repeats):
            model = Row(groups, each)
            times["compute_module_sizes"].append(clock(lambda model=model: compute_module_sizes(model))[0])
            planned, found = clock(
                lambda model=model, budgets=budgets: infer_auto_device_map(model, max_memory=dict(budgets))
            )
            assert set(found.values()) == {"cpu", "disk"}, found
            times["infer_auto_device_map"].append(planned)
            times["dispatch_model"].append(
                clock(lambda model=model, places=device_map: dispatch_model(model, places, force_hooks=True))[0]
            )
        if modules > 100:
            figures |= {f"{name}, {modules} modules (s)": statistics.median(found) for name, found in times.items()}
    return figures


def accelerator(folder, megabytes):
    """Blocks in host memory and a forward on the accelerator, next to the copy of their bytes. None where there is none."""
    if not torch.cuda.is_available():
        return {}
    from safetensors.torch import load_file

    model, x = empty(megabytes), rows(megabytes).to(0)
    device_map = {f"blocks.{number}": 0 if number < BLOCKS - ON_DISK else "cpu" for number in range(BLOCKS)}
    model = load_checkpoint_and_dispatch(model, str(Path(folder, "float32")), device_map=device_map)
    tensors = [tensor.pin_memory() for tensor in load_file(shard(Path(folder, "float32"), 0)).values()]

    def copy():
        for _ in range(ON_DISK):
            for tensor in tensors:
                tensor.to(0, non_blocking=True)
        torch.cuda.synchronize()

    def forward():
        model(x)
        torch.cuda.synchronize()

    copy(), forward(), forward()
    copied = statistics.median(clock(copy)[0] for _ in range(5))
    ran = statistics.median(clock(forward)[0] for _ in range(5))
    return {
        "forward from host memory (s)": ran,
        "host-to-device copy of the same bytes (s)": copied,
        "forward / copy": ran / copied,
    }


def main():
    tasks = {
        "make": make,
        "cpu": lambda folder, megabytes: load_to_cpu(folder, megabytes, False),
        "cpu-cold": lambda folder, megabytes: load_to_cpu(folder, megabytes, True),
        "disk": lambda folder, megabytes: offload_to_disk(folder, megabytes, False),
        "disk-cold": lambda folder, megabytes: offload_to_disk(folder, megabytes, True),
        "cast": lambda folder, megabytes: offload_to_disk(folder, megabytes, False, "bfloat16"),
        "limits": limits,
        "hooks": lambda folder, megabytes: hooks(),
        "growth": lambda folder, megabytes: growth(),
        "accelerator": accelerator,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=tasks)
    parser.add_argument("--folder", default="")
    parser.add_argument("--megabytes", type=int, default=3072)
    parser.add_argument("--prefetch", choices=["0", "1"], help="of ours; upstream has none")
    arguments = parser.parse_args()
    if arguments.prefetch is not None:
        os.environ["ACCELERATE_OFFLOAD_PREFETCH"] = arguments.prefetch
    print(json.dumps(tasks[arguments.phase](arguments.folder, arguments.megabytes)), flush=True)


if __name__ == "__main__":
    main()
