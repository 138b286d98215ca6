"""The content of a configuration file as an object that loads and saves itself."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from accelerate.config.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accelerate.config.options import SECTIONS
from accelerate.extensions.configure import config_utils
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError

cache_dir = files.cache_dir()
hf_cache_home = os.path.dirname(cache_dir)
default_json_config_file = default_yaml_config_file = os.path.join(cache_dir, "default_config.yaml")
# For a new file; where only an old JSON file exists, that one.
default_config_file = files.default_path()
SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> "BaseConfig":
    """Load a configuration file, YAML or JSON by its ending.

    Args:
        config_file: the file; None is the default one.

    Returns:
        A `ClusterConfig`, or a `SageMakerConfig` if the file is for SageMaker.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds an unknown key or word, or lacks `distributed_type`.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        ...     print("{distributed_type: MULTI_CPU, num_processes: 2}", file=file, flush=True)
        ...     load_config_from_file(file.name).num_processes
        2
    """
    path = config_utils.find_required(config_file)
    return config_of(files.load_mapping(path), path)


def config_of(content: Mapping[str, Any], path: str | os.PathLike[str]) -> "BaseConfig":
    """Return the content of a configuration file as a `ClusterConfig`, or as a `SageMakerConfig` if it is for SageMaker."""
    environment = content.get("compute_environment") or ComputeEnvironment.LOCAL_MACHINE
    sagemaker = ComputeEnvironment(environment) is ComputeEnvironment.AMAZON_SAGEMAKER
    return (SageMakerConfig if sagemaker else ClusterConfig)._from_mapping(content, path)


@dataclass
class BaseConfig:
    """The settings of every configuration file.

    Attributes:
        compute_environment: where the processes run.
        distributed_type: how they cooperate.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        use_cpu: stay on the CPU.
        debug: check collectives while the script runs.
    """

    __module__ = "accelerate.commands.config.config_args"  # the path in pickles

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are not None, in plain types."""
        content = dataclasses.asdict(self)
        plain = {key: value.value if isinstance(value, Enum) else value for key, value in content.items()}
        return {key: value for key, value in plain.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert the content of a file to the current format: add defaults, replace old spellings.

        Args:
            config_dict: the content of the file; it is not changed.

        Returns:
            A new mapping.

        Raises:
            LaunchError: `distributed_type` is missing.
        """
        defaults = {"compute_environment": ComputeEnvironment.LOCAL_MACHINE, "mixed_precision": None}
        defaults |= dict.fromkeys(("use_cpu", "debug", "enable_cpu_affinity"), False)
        content = defaults | files.modernise(config_dict)
        if "distributed_type" not in content:
            raise LaunchError("The configuration file lacks `distributed_type`; NO is the plain choice.")
        if content["distributed_type"] == "NO" and content["compute_environment"] == ComputeEnvironment.LOCAL_MACHINE:
            content.setdefault("num_processes", 1)
        return content

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> "BaseConfig":
        """Load a JSON file, the default one for None; raises as `load_config_from_file`."""
        return cls.from_yaml_file(json_file)  # the ending decides

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> "BaseConfig":
        """Load a YAML file, the default one for None; raises as `load_config_from_file`."""
        path = config_utils.find_required(yaml_file)
        return cls._from_mapping(files.load_mapping(path), path)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write a JSON file atomically; an existing one is replaced."""
        config_utils.write(json_file, self.to_dict(), as_json=True)

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write a YAML file atomically; an existing one is replaced."""
        config_utils.write(yaml_file, self.to_dict(), as_json=False)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write a file, JSON if its name ends so, else YAML, and return its path; its folder is made.

        Raises:
            LaunchError: it cannot be written there.
        """
        config_utils.write(path, self.to_dict())
        return pathlib.Path(path)

    @classmethod
    def _from_mapping(cls, content: Mapping[str, Any], path: str | os.PathLike[str]) -> "BaseConfig":
        content = cls.process_config(dict(content))
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(str(key) for key in content if key not in fields)
        if unknown:
            explanations = " ".join(files.unknown_key(key, sorted(fields)) for key in unknown[:5])
            raise LaunchError(f"The configuration file {path} has unknown keys: {explanations}")
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if lacking := sorted(required - content.keys()):
            raise LaunchError(f"The configuration file {path} lacks {', '.join(lacking)}.")
        return cls(**content)

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        sagemaker = self.compute_environment is ComputeEnvironment.AMAZON_SAGEMAKER
        kinds = SageMakerDistributedType if sagemaker else DistributedType
        self.distributed_type = kinds(self.distributed_type)
        for section in SECTIONS:
            if getattr(self, section, self) is None:
                setattr(self, section, {})


@dataclass
class ClusterConfig(BaseConfig):
    """A configuration file for the user's own machines.

    Attributes: the keys of the file; the option table (`accelerate.config.options`) explains each. Attributes that end with
    `_config` hold the mapping of the same name.
    """

    __module__ = "accelerate.commands.config.config_args"  # the path in pickles

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool | str = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None


@dataclass
class SageMakerConfig(BaseConfig):
    """A configuration file for jobs on Amazon SageMaker.

    Attributes: the keys of the file; names are those of SageMaker's estimator.
    """

    __module__ = "accelerate.commands.config.config_args"  # the path in pickles

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False
