"""The tensors of files of weights, from their headers: no tensor is read, and no code in a file runs."""

from accelerate.checkpoint.manifest import DamagedCheckpoint, TensorEntry
from accelerate.runtime import durable


def header_of(path: str) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file, by name, without reading them; DamagedCheckpoint if it is none."""
    from safetensors import SafetensorError, safe_open

    durable.require_file(path)
    try:
        # Opened here first, because the library calls every file missing that it cannot open.
        with open(path, "rb"), safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            return {name: TensorEntry(tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except SafetensorError as error:
        raise DamagedCheckpoint(" ".join(str(error).split())) from None


def tensors_of_shards(folder: str) -> dict[str, TensorEntry]:
    """Return the tensors of a folder of shards, by name, without reading them; may raise DamagedCheckpoint."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from accelerate.checkpoint.dcp import read_metadata
    from accelerate.checkpoint.formats import tensor_entry

    metadata = read_metadata(folder)
    paths = {key: metadata.planner_data.get(key, (key,)) for key in metadata.state_dict_metadata}
    # All of it may lie together under one name, such as "model".
    together = len({path[0] for path in paths.values()}) == 1 and all(len(path) > 1 for path in paths.values())
    return {
        ".".join(map(str, paths[key][int(together) :])): tensor_entry(value.size, value.properties.dtype)
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
