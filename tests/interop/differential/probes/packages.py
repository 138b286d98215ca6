"""`utils.imports`: what is found installed, with packages of our own making on the path, and the decorators that ask."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import imports, versions
from interop.differential.core import probe

# Function -> the module it looks for and the name of its distribution.
PACKAGES = {
    "is_aim_available": ("aim", "aim"), "is_amdsmi_available": ("amdsmi", "amdsmi"),
    "is_bnb_available": ("bitsandbytes", "bitsandbytes"), "is_4bit_bnb_available": ("bitsandbytes", "bitsandbytes"),
    "is_8bit_bnb_available": ("bitsandbytes", "bitsandbytes"),
    "is_bitsandbytes_multi_backend_available": ("bitsandbytes", "bitsandbytes"),
    "is_boto3_available": ("boto3", "boto3"), "is_clearml_available": ("clearml", "clearml"),
    "is_comet_ml_available": ("comet_ml", "comet_ml"), "is_datasets_available": ("datasets", "datasets"),
    "is_deepspeed_available": ("deepspeed", "deepspeed"), "is_dvclive_available": ("dvclive", "dvclive"),
    "is_fp8_available": ("transformer_engine", "transformer-engine"),
    "is_import_timer_available": ("import_timer", "import-timer"), "is_lomo_available": ("lomo_optim", "lomo-optim"),
    "is_matplotlib_available": ("matplotlib", "matplotlib"), "is_megatron_lm_available": ("megatron", "megatron-lm"),
    "is_mlflow_available": ("mlflow", "mlflow"), "is_msamp_available": ("msamp", "ms-amp"),
    "is_pandas_available": ("pandas", "pandas"), "is_peft_available": ("peft", "peft"),
    "is_pippy_available": ("pippy", "torchpippy"), "is_pynvml_available": ("pynvml", "nvidia-ml-py"),
    "is_pytest_available": ("pytest", "pytest"), "is_rich_available": ("rich", "rich"),
    "is_sagemaker_available": ("sagemaker", "sagemaker"),
    "is_schedulefree_available": ("schedulefree", "schedulefree"), "is_swanlab_available": ("swanlab", "swanlab"),
    "is_tensorboard_available": ("tensorboardX", "tensorboardX"), "is_timm_available": ("timm", "timm"),
    "is_torchao_available": ("torchao", "torchao"), "is_torchdata_available": ("torchdata", "torchdata"),
    "is_torchdata_stateful_dataloader_available": ("torchdata", "torchdata"),
    "is_torchvision_available": ("torchvision", "torchvision"), "is_tqdm_available": ("tqdm", "tqdm"),
    "is_trackio_available": ("trackio", "trackio"),
    "is_transformer_engine_available": ("transformer_engine", "transformer-engine"),
    "is_transformer_engine_mxfp8_available": ("transformer_engine", "transformer-engine"),
    "is_transformers_available": ("transformers", "transformers"), "is_triton_available": ("triton", "triton"),
    "is_wandb_available": ("wandb", "wandb"),
}  # fmt: skip
HARDWARE = (
    "is_bf16_available is_cuda_available is_fp16_available is_habana_gaudi1 is_hpu_available is_mlu_available is_mps_available "
    "is_musa_available is_neuron_available is_npu_available is_numpy_available is_rocm_available is_sdaa_available is_torch_xla_available "
    "is_torch_distributed_available is_weights_only_available is_xccl_available is_xpu_available"
)
COVERED = [f"utils.imports:{name}" for name in PACKAGES]


def forget() -> None:
    for function in [*vars(imports).values(), *vars(versions).values()]:
        getattr(function, "cache_clear", lambda: None)()
    getattr(imports, "_found", set()).clear()


def ask(function: str, *args: Any) -> Any:
    """Call a function without an answer of its own from before."""
    forget()
    try:
        return bool(getattr(imports, function)(*args))
    finally:
        forget()


@contextlib.contextmanager
def made(module: str, distribution: str, version: str | None, text: str) -> Iterator[None]:
    """Put a package on the path; without a version it has no metadata, as a folder of that name in the working directory."""
    root = Path("site").resolve()
    (root / module).mkdir(parents=True)
    (root / module / "__init__.py").write_text(text)
    if version is not None:
        info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    before = set(sys.modules)
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == module:
                del sys.modules[name]
        importlib.invalidate_caches()


@probe(*COVERED, *[f"utils.imports:{name}" for name in HARDWARE.split()], function=[*PACKAGES, *HARDWARE.split()])  # fmt: skip
def as_it_is(function: str) -> bool:
    return ask(function)


@probe("utils.imports:is_bf16_available", ignore=[True, False, None, "x"])
def bf16(ignore: Any) -> bool:
    return ask("is_bf16_available", ignore)
