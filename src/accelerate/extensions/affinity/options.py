"""The option that binds processes to cores."""

from accelerate.config.options.general import RESOURCES
from accelerate.config.options.schema import ONE, rows

OPTIONS = (
    rows(RESOURCES)(
        "enable_cpu_affinity",
        "Bind each process to the CPU cores next to its GPU (NVIDIA).",
        default=False,
        switch=True,
        env="ACCELERATE_CPU_AFFINITY",
        style=ONE,
        chapter="processes",
        when={"kind": ("MULTI_GPU",)},
        before="dynamo_backend",
    ),
)
