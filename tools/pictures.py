"""Draw the pictures of the pages, each for a light and for a dark page, as SVG.

    python tools/pictures.py

It needs matplotlib, as the benchmarks do (`make .venv/.ready-bench`). The files go to docs/img as NAME-light.svg and NAME-dark.svg.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
# What benchmarks/restart.py has measured.
RESTARTS = ROOT / "benchmarks" / "results" / "restart.json"


@dataclass(frozen=True)
class Palette:
    """Colours of one kind of page."""

    name: str
    text: str
    line: str
    box: str
    first: str
    second: str
    third: str
    fourth: str


LIGHT = Palette("light", "#1f2430", "#5c6370", "#eef1f6", "#3f6fd8", "#d9822b", "#2e9e6b", "#9a4fc4")
DARK = Palette("dark", "#e3e6ed", "#9aa2b1", "#262b36", "#7aa2f7", "#f0a35e", "#63c79a", "#c792ea")


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure without axes whose coordinates are inches."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def box(
    axes: Any, at: tuple[float, float], size: tuple[float, float], text: str, fill: str, palette: Palette, **words: Any
) -> None:
    """Draw a box with its text in the middle."""
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.05"
    axes.add_patch(FancyBboxPatch(at, *size, boxstyle=shape, facecolor=fill, edgecolor=palette.line, linewidth=0.8))
    options = {"ha": "center", "va": "center", "fontsize": 8.5, "color": palette.text} | words
    axes.text(at[0] + size[0] / 2, at[1] + size[1] / 2, text, **options)


def arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], palette: Palette, both: bool = False
) -> None:
    """Draw an arrow."""
    style = "<->" if both else "->"
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": palette.line, "lw": 1.1})


def label(axes: Any, x: float, y: float, text: str, palette: Palette, **words: Any) -> None:
    """Write a text."""
    options = {"ha": "left", "va": "center", "fontsize": 8.5, "color": palette.text} | words
    axes.text(x, y, text, **options)


def on(colour: str, palette: Palette) -> str:
    """Return the colour of a text in a box of this colour."""
    return palette.text if colour == palette.box else ("#ffffff" if palette is LIGHT else "#15181f")


def row(
    axes: Any, at: tuple[float, float], parts: list[tuple[str, float, str]], palette: Palette, height: float = 0.45
) -> list[float]:
    """Draw boxes side by side, each with its text, width and colour, and return where they begin."""
    x, places = at[0], []
    for text, width, colour in parts:
        box(axes, (x, at[1]), (width, height), text, colour, palette, fontsize=7.5, color=on(colour, palette))
        places.append(x)
        x += width + 0.05
    return places


def layers(palette: Palette) -> Any:
    """Three layers: the program, the Accelerator, strategies over devices."""
    figure, axes = canvas(7.2, 3.5)
    rows = [
        (2.55, "your program", ["model", "optimizer", "loader", "scheduler", "loop"], palette.first),
        (
            1.4,
            "Accelerator",
            ["prepare", "accumulate\nbackward, clip", "gather", "save_state\nload_state", "log"],
            palette.second,
        ),
        (
            0.25,
            "strategies",
            ["DDP", "FSDP2, HSDP", "tensor, context,\nsequence, experts", "DeepSpeed", "one process"],
            palette.third,
        ),
    ]
    for y, title, parts, colour in rows:
        label(axes, 0.1, y + 0.4, title, palette, fontsize=10, color=colour, fontweight="bold")
        for index, part in enumerate(parts):
            box(axes, (1.45 + index * 1.13, y), (1.05, 0.8), part, palette.box, palette, fontsize=7.5)
    for y in (2.52, 1.37):
        arrow(axes, (4.25, y), (4.25, y - 0.28), palette)
    label(axes, 4.35, 2.38, "one call each", palette, fontsize=7.5, color=palette.line)
    label(axes, 4.35, 1.23, "torch.distributed, devices, precision", palette, fontsize=7.5, color=palette.line)
    return figure


def timeline(palette: Palette) -> Any:
    """One optimizer step of two micro-batches on two ranks, with what is sent."""
    figure, axes = canvas(7.6, 3.3)
    phases = [
        ("load", 0.45, palette.box),
        ("forward", 0.85, palette.first),
        ("backward", 1.15, palette.second),
        ("load", 0.45, palette.box),
        ("forward", 0.85, palette.first),
        ("backward", 1.15, palette.second),
        ("clip", 0.4, palette.box),
        ("step", 0.45, palette.third),
    ]
    for rank, y in (("rank 0", 2.2), ("rank 1", 0.75)):
        label(axes, 0.1, y + 0.22, rank, palette, fontsize=9.5, fontweight="bold")
        row(axes, (0.9, y), phases, palette)
    start = 0.9 + 0.45 + 0.85 + 1.15 + 0.45 + 0.85 + 5 * 0.05
    for index in range(4):
        arrow(axes, (start + 0.3 + index * 0.25, 1.25), (start + 0.3 + index * 0.25, 2.15), palette, both=True)
    label(axes, start - 0.1, 1.72, "all-reduce", palette, ha="right", fontsize=8, color=palette.fourth)
    for x, text in (
        (0.95, "micro-batch 1: gradients stay on the rank"),
        (start - 1.35, "micro-batch 2: gradients are averaged"),
    ):
        label(axes, x, 2.95, text, palette, fontsize=8, color=palette.line)
    label(
        axes,
        0.95,
        0.35,
        "one optimizer step with gradient_accumulation_steps=2, DDP",
        palette,
        fontsize=8,
        color=palette.line,
    )
    return figure


def who_holds_what(palette: Palette) -> Any:
    """What four ranks keep of one weight matrix, under four strategies."""
    from matplotlib.patches import Rectangle

    figure, axes = canvas(7.6, 3.4)
    # For each strategy what each rank keeps of one weight matrix: cells of four rows (outputs) and four columns (inputs).
    full = [(r, c) for r in range(4) for c in range(4)]
    layouts: list[tuple[str, str, Callable[[int], list[tuple[int, int]]]]] = [
        ("DDP", "4 replicas", lambda rank: full),
        ("FSDP2", "4 shards", lambda rank: [(rank, c) for c in range(4)]),
        (
            "HSDP",
            "2 replicas x 2 shards",
            lambda rank: [(r, c) for r in range(2 * (rank % 2), 2 * (rank % 2) + 2) for c in range(4)],
        ),
        ("tensor parallelism", "4 parts (row-wise)", lambda rank: [(r, rank) for r in range(4)]),
    ]
    colours = (palette.first, palette.second, palette.third, palette.fourth)
    for column, (title, note, held) in enumerate(layouts):
        left = 0.75 + column * 1.75
        label(axes, left + 0.65, 3.2, title, palette, ha="center", fontsize=9.5, fontweight="bold")
        label(axes, left + 0.65, 2.98, note, palette, ha="center", fontsize=7.5, color=palette.line)
        for rank in range(4):
            x, y = left + (rank % 2) * 0.72, 1.7 - (rank // 2) * 1.15
            for r, c in full:
                mine = (r, c) in held(rank)
                axes.add_patch(
                    Rectangle(
                        (x + c * 0.145, y + (3 - r) * 0.22),
                        0.145,
                        0.22,
                        facecolor=colours[rank] if mine else palette.box,
                        edgecolor=palette.line,
                        linewidth=0.4,
                    )
                )
            label(axes, x + 0.29, y - 0.11, f"rank {rank}", palette, ha="center", fontsize=7)
    label(
        axes,
        0.75,
        0.2,
        "A square is one weight matrix with its gradient and optimizer state; coloured is what the rank keeps.\nFSDP gathers the matrix for use, tensor parallelism never does.",
        palette,
        fontsize=7,
        color=palette.line,
    )
    return figure


def scaler(palette: Palette) -> Any:
    """The life of the gradient scaler in one step."""
    figure, axes = canvas(7.6, 2.5)
    steps = [
        ("loss", palette.box),
        ("x scale\nbackward", palette.first),
        ("/ scale\nclip, unscale", palette.second),
        ("infinite\nsomewhere?", palette.box),
        ("step\nschedule", palette.third),
    ]
    for index, (text, colour) in enumerate(steps):
        box(axes, (0.2 + index * 1.48, 1.35), (1.2, 0.7), text, colour, palette, color=on(colour, palette))
        if index:
            arrow(axes, (0.2 + index * 1.48 - 0.27, 1.7), (0.2 + index * 1.48 - 0.02, 1.7), palette)
    box(
        axes,
        (4.64, 0.3),
        (1.2, 0.55),
        "no step\nscale / 2",
        palette.fourth,
        palette,
        color=on(palette.fourth, palette),
    )
    arrow(axes, (5.24, 1.33), (5.24, 0.87), palette)
    label(axes, 5.32, 1.1, "yes, on some rank", palette, fontsize=7.5, color=palette.line)
    label(axes, 5.9, 1.9, "no", palette, fontsize=7.5, color=palette.line)
    label(axes, 6.1, 0.57, "after 2,000 steps\nwithout one: scale x 2", palette, fontsize=7.5, color=palette.line)
    return figure


def accumulation(palette: Palette) -> Any:
    """What the gradients of two ranks hold over one accumulation step of four micro-batches."""
    figure, axes = canvas(7.6, 2.9)
    for rank, y in (("rank 0", 1.75), ("rank 1", 0.6)):
        label(axes, 0.1, y + 0.25, rank, palette, fontsize=9.5, fontweight="bold")
        parts = [(f"loss {number} / 4", 1.15, palette.first) for number in (1, 2, 3, 4)]
        places = row(axes, (0.9, y), [*parts, ("step", 0.7, palette.third)], palette, height=0.32)
        for number, x in enumerate(places[:4], 1):
            box(axes, (x, y + 0.4), (1.15 * number / 4, 0.14), "", palette.second, palette)
    for x in (4.7, 5.0, 5.3):
        arrow(axes, (x, 1.2), (x, 1.7), palette, both=True)
    label(axes, 4.55, 1.4, "one exchange: the mean over ranks", palette, ha="right", fontsize=8, color=palette.fourth)
    label(
        axes, 0.9, 2.6, "the bar is what the gradients hold: a quarter more with each micro-batch", palette, fontsize=8
    )
    note = "gradient_accumulation_steps=4: three backward passes without communication, one with, then the optimizer's step"
    label(axes, 0.9, 0.25, note, palette, fontsize=7.5, color=palette.line)
    return figure


def sequences(palette: Palette) -> Any:
    """How attention gets all tokens of a sequence that two ranks share: context and sequence parallelism."""
    figure, axes = canvas(7.6, 3.6)
    colours = (palette.first, palette.second)
    for left, title in ((0.3, "context parallelism"), (4.1, "sequence parallelism")):
        label(axes, left, 3.35, title, palette, fontsize=9.5, fontweight="bold")
    for rank, colour in enumerate(colours):
        own = [(f"tokens {4 * rank}-{4 * rank + 3}", 1.45, colour)]
        both = [("0-3", 0.7, colours[0]), ("4-7", 0.7, colours[1])]
        for left in (0.3, 4.1):
            label(axes, left + 1.55 * rank + 0.7, 3.05, f"rank {rank}", palette, ha="center", fontsize=8)
            row(axes, (left + 1.55 * rank, 2.5), own, palette, height=0.35)
            row(axes, (left + 1.55 * rank, 0.55), own, palette, height=0.35)
        row(axes, (0.3 + 1.55 * rank, 1.5), both, palette, height=0.35)
        heads = [(f"all tokens, heads {4 * rank}-{4 * rank + 3}", 1.45, palette.third)]
        row(axes, (4.1 + 1.55 * rank, 1.5), heads, palette, height=0.35)
    for left, texts in (
        (0.3, ("keys and values of all tokens: all-gather", "queries stay: nothing is sent")),
        (4.1, ("heads for tokens: all-to-all", "tokens for heads: all-to-all")),
    ):
        for y, text in zip((2.17, 1.2), texts, strict=True):
            arrow(axes, (left + 0.15, y + 0.27), (left + 0.15, y - 0.25), palette)
            label(axes, left + 0.3, y, text, palette, fontsize=7.5, color=palette.fourth)
    note = (
        "above: what a rank holds of the activations; middle: what its attention reads; below: its part of the result"
    )
    label(axes, 0.3, 0.2, note, palette, fontsize=7.5, color=palette.line)
    return figure


def machines(palette: Palette) -> Any:
    """Processes over two machines: launchers, ranks, devices, and the key-value store."""
    figure, axes = canvas(7.6, 3.1)
    for machine, left in enumerate((0.15, 4.15)):
        box(axes, (left, 0.45), (3.3, 2.3), "", "none", palette)
        label(axes, left + 0.1, 2.58, f"machine {machine}", palette, fontsize=9.5, fontweight="bold")
        box(
            axes,
            (left + 0.1, 1.9),
            (1.45, 0.45),
            "accelerate launch",
            palette.first,
            palette,
            fontsize=7.5,
            color=on("", palette),
        )
        for local in range(2):
            rank, x = 2 * machine + local, left + 0.1 + 1.6 * local
            text = f"rank {rank}, local rank {local}"
            box(axes, (x, 1.05), (1.5, 0.4), text, palette.second, palette, fontsize=7.5, color=on("", palette))
            box(axes, (x, 0.55), (1.5, 0.35), f"device {local}", palette.box, palette, fontsize=7.5)
            arrow(axes, (left + 0.8, 1.88), (x + 0.75, 1.47), palette)
    box(axes, (1.95, 1.9), (1.4, 0.45), "key-value store", palette.third, palette, fontsize=7.5, color=on("", palette))
    arrow(axes, (1.66, 2.12), (1.99, 2.12), palette, both=True)
    arrow(axes, (4.28, 2.12), (3.32, 2.12), palette, both=True)
    label(axes, 3.5, 2.3, "heartbeats", palette, fontsize=7, color=palette.line)
    arrow(axes, (3.32, 1.25), (4.28, 1.25), palette, both=True)
    label(axes, 3.5, 1.38, "gradients", palette, fontsize=7, color=palette.line)
    note = "--num_machines 2 --num_processes 4: the number of processes is that of all machines"
    label(axes, 0.15, 0.2, note, palette, fontsize=7.5, color=palette.line)
    return figure


def preemption(palette: Palette) -> Any:
    """A run that is preempted, saves, leaves with status 75, and continues."""
    figure, axes = canvas(7.6, 2.3)
    first = [("steps", 1.3, palette.first), ("step", 0.55, palette.first), ("save_state", 0.85, palette.second)]
    first += [("exit 75", 0.65, palette.fourth)]
    again = [("queue", 0.75, palette.box), ("load_state", 0.85, palette.second), ("steps", 1.3, palette.first)]
    for rank, y in (("rank 0", 1.2), ("rank 1", 0.65)):
        label(axes, 0.1, y + 0.2, rank, palette, fontsize=9.5, fontweight="bold")
        places = row(axes, (0.75, y), [*first, *again], palette, height=0.4)
    arrow(axes, (2.0, 1.95), (2.0, 1.62), palette)
    label(axes, 2.0, 2.08, "SIGTERM at one rank", palette, ha="center", fontsize=8, color=palette.fourth)
    label(axes, places[2], 1.78, "all ranks agree on the same step", palette, fontsize=7.5, color=palette.line)
    note = "the scheduler starts the job again because of its exit status; the next sample is that of a run that was not stopped"
    label(axes, 0.75, 0.35, note, palette, fontsize=7.5, color=palette.line)
    return figure


def precedence(palette: Palette) -> Any:
    """Which setting counts where several say something."""
    figure, axes = canvas(7.6, 2.5)
    sources = [
        ("the script", 'Accelerator(mixed_precision="bf16")', palette.first),
        ("the command line", "accelerate launch --mixed_precision bf16", palette.second),
        ("variables", "ACCELERATE_MIXED_PRECISION=bf16", palette.third),
        ("the file", "mixed_precision: bf16", palette.fourth),
        ("defaults", "no", palette.box),
    ]
    for number, (source, example, colour) in enumerate(sources):
        y = 2.0 - 0.42 * number
        box(axes, (0.6, y), (1.7, 0.34), source, colour, palette, fontsize=8, color=on(colour, palette))
        label(axes, 2.45, y + 0.17, example, palette, fontsize=8, family="monospace")
    arrow(axes, (0.35, 0.35), (0.35, 2.3), palette)
    label(
        axes,
        6.1,
        1.25,
        "the upper one\ncounts; two\nexceptions are\nin the text",
        palette,
        fontsize=7.5,
        color=palette.line,
    )
    return figure


def measured_phases(file: pathlib.Path) -> list[tuple[str, list[tuple[str, float]]]]:
    """Return rows of a file of measurements, each with its label and the seconds of its phases in their order.

    Args:
        file: JSON, a list of rows or an object with `rows`. A row has `label` and `phases`: pairs, objects with `phase` and
            `seconds`, or one object with the seconds by phase.
    """
    content = json.loads(file.read_text("utf-8"))
    rows = []
    for row in content["rows"] if isinstance(content, Mapping) else content:
        phases = row["phases"].items() if isinstance(row["phases"], Mapping) else row["phases"]
        pairs = [(each["phase"], each["seconds"]) if isinstance(each, Mapping) else each for each in phases]
        rows.append((str(row["label"]), [(str(phase), float(seconds)) for phase, seconds in pairs if seconds > 0]))
    return rows


def restarts(palette: Palette) -> Any:
    """From a failure to the first new step, for each way of continuing, as it was measured."""
    rows = measured_phases(RESTARTS)
    figure, axes = canvas(7.6, 0.8 + 0.5 * len(rows))
    names = list(dict.fromkeys(phase for _, phases in rows for phase, _ in phases))
    colours = [palette.fourth, palette.second, palette.first, palette.third, palette.line, palette.box]
    colour_of = {name: colours[number % len(colours)] for number, name in enumerate(names)}
    left, width = 1.75, 5.0
    scale = width / max(sum(seconds for _, seconds in phases) for _, phases in rows)
    top = 0.5 + 0.5 * len(rows)
    for number, (title, phases) in enumerate(rows):
        x, y = left, top - 0.5 * (number + 1)
        label(axes, 0.1, y + 0.17, title, palette, fontsize=8.5, fontweight="bold")
        for phase, seconds in phases:
            bar(axes, (x, y), (seconds * scale, 0.34), colour_of[phase], palette)
            x += seconds * scale
        label(axes, x + 0.08, y + 0.17, f"{sum(seconds for _, seconds in phases):.2f} s", palette, fontsize=8)
    label(
        axes, left, top + 0.12, "from the failure to the end of the next step", palette, fontsize=8, color=palette.line
    )
    for number, name in enumerate(names):
        x, y = left + 1.45 * (number % 4), 0.3 - 0.2 * (number // 4)
        bar(axes, (x, y - 0.05), (0.12, 0.12), colour_of[name], palette)
        label(axes, x + 0.18, y + 0.01, name, palette, fontsize=7.5)
    return figure


def bar(axes: Any, at: tuple[float, float], size: tuple[float, float], fill: str, palette: Palette) -> None:
    """Draw a rectangle with the exact length of a measurement."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(at, *size, facecolor=fill, edgecolor=palette.line, linewidth=0.5))


PICTURES: dict[str, Callable[[Palette], Any]] = {
    "layers": layers,
    "step-timeline": timeline,
    "who-holds-what": who_holds_what,
    "scaler": scaler,
    "accumulation": accumulation,
    "sequences": sequences,
    "machines": machines,
    "preemption": preemption,
    "precedence": precedence,
    "restarts": restarts,
}
# Pictures that need a file of measurements.
NEEDS = {"restarts": RESTARTS}


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw every picture into a folder, and return the files. The same program draws the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "pictures", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot

    files = []
    for name, picture in PICTURES.items():
        if name in NEEDS and not NEEDS[name].exists():
            continue  # not measured yet
        for palette in (LIGHT, DARK):
            figure = picture(palette)
            file = folder / f"{name}-{palette.name}.svg"
            figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
            file.write_text("\n".join(line.rstrip() for line in file.read_text("utf-8").splitlines()) + "\n", "utf-8")
            files.append(file)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=IMAGES, help="the folder; docs/img by default")
    for file in draw(parser.parse_args().out):
        print(file.name)


if __name__ == "__main__":
    main()
