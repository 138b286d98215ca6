"""Every tracker whose library is installed logs one real run, offline, which is read back from what the library wrote."""

import csv
import dataclasses
import io
import json
import pathlib
import socket
import sqlite3
import struct
import zipfile

import numpy as np
import pytest
import torch
import yaml

from accelerate import Accelerator

CONFIG = {"lr": 0.1, "layers": 3, "name": "x", "nested": {"a": 1}, "path": pathlib.PurePosixPath("p/q")}
STEPS = (0, 2, 4)
IMAGE = np.full((8, 8, 3), 120, dtype=np.uint8)
ROWS = [[1, "u"], [2, "v"]]
TEXTS = {"comet_ml", "dvclive", "tensorboard", "trackio", "wandb"}
GROUPS = {"comet_ml", "swanlab", "tensorboard", "trackio", "wandb"}


@dataclasses.dataclass
class Found:
    """What a library wrote: the configuration, each name's values by step, and the pixels and rows of what has any."""

    config: dict
    logged: dict = dataclasses.field(default_factory=dict)
    images: list = dataclasses.field(default_factory=list)
    table: list | None = None

    def add(self, name, step, value):
        self.logged.setdefault(name, {})[step] = value

    def add_image(self, source):
        from PIL import Image

        self.images.append(np.asarray(Image.open(source).convert("RGB")))


def log_records(path):
    """Yield the records of a file framed as LevelDB's log is, after its header of 7 bytes, as W&B and SwanLab write them."""
    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(folder):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process may still be writing the file when `finish` returns
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = Found({})
    for record in map(Record.FromString, log_records(path)):
        found.config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        items = {".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            found.add(name, items["_step"], value)
    for (name,) in found.logged.get("picture.filenames", {}).values():
        found.add_image(path.parent / "files" / name)
    (table,) = path.parent.glob("files/media/table/*.table.json")
    found.table = json.loads(table.read_text())["data"]
    return found


def read_swanlab(folder):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    (path,) = folder.glob("runs/run-*/*.swanlab")
    config = yaml.safe_load((path.parent / "files/config.yaml").read_text("utf-8"))
    found = Found({name: item["value"] for name, item in config.items()})
    for record in map(Record.FromString, log_records(path)):
        if record.HasField("scalar"):
            found.add(record.scalar.key.replace("/", "."), record.scalar.step, record.scalar.value.number)
        elif record.HasField("media"):
            for item in record.media.value.items:
                found.add_image(path.parent / "media/image" / item.filename)
    return found


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    found = Found({name: yaml.safe_load(text) for name, text in run.data.params.items()})
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found.add(name, metric.step, metric.value)
    return found


def read_aim(folder):
    from aim.storage.encoding import decode, decode_path
    from aim.storage.rockscontainer import RocksContainer

    # Not by `aim.Repo`: with 3.29.1 it found nothing in what a script of Aim alone had written, either.
    (meta,) = folder.glob("project/.aim/meta/chunks/*")
    (sequences,) = folder.glob("project/.aim/seqs/chunks/*")
    found = Found(RocksContainer(str(meta), read_only=True).tree().collect()["meta"]["attrs"]["hparams"])
    fields = {}
    for key, value in RocksContainer(str(sequences), read_only=True).items():
        name, *field = decode_path(key)[5:]
        if field and name != "picture":
            fields.setdefault((name, field[-1]), {})[field[0]] = decode(value)
        elif field[-1:] == ["data"]:
            found.add_image(io.BytesIO(decode(value)))
    for (name, _), entry in fields.items():
        if {"step", "val"} <= set(entry):
            found.add(name, entry["step"], entry["val"])
    return found


def read_comet_ml(folder):
    (path,) = folder.glob("comet/*.zip")
    found, step = Found({}), None
    for line in zipfile.ZipFile(path).read("messages.json").splitlines():
        message = json.loads(line)["payload"]
        if parameter := message.get("param"):
            name, _, inner = parameter["paramName"].partition("|")
            value = parameter["paramValue"]
            found.config[name] = {inner: value} if inner else value
            step = found.config.get("curr_step")
        elif metric := message.get("metric"):
            name = {"x": "group.x"}.get(metric["metricName"], metric["metricName"])
            found.add(name, metric["step"], metric["metricValue"])
        elif "key" in message:
            found.add(message["key"], step, message["value"])
    return found


def read_clearml(folder):
    from clearml.utilities.pyhocon import ConfigFactory

    (run,) = (path for path in folder.glob("clearml/offline/*") if path.is_dir())
    text = json.loads((run / "task.json").read_text())["configuration"]["General"]["value"]
    found = Found(ConfigFactory.parse_string(text).as_plain_ordered_dict())
    for event in (event for line in (run / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)):
        if event["type"] == "training_stats_scalar":
            prefix = "" if event["variant"] == "train" else f"{event['variant']}_"
            found.add(prefix + event["metric"], event["iter"], event["value"])
        elif event["type"] == "training_debug_image":
            found.add_image(event["url"])
        else:
            (table,) = json.loads(event["plot_str"])["data"]
            found.table = [list(row) for row in zip(*table["cells"]["values"], strict=True)]
    return found


def read_dvclive(folder):
    found = Found(yaml.safe_load((folder / "live/params.yaml").read_text()))
    for path in folder.glob("live/plots/metrics/*.tsv"):
        with path.open() as file:
            for row in csv.DictReader(file, delimiter="\t"):
                found.add(path.stem, int(row["step"]), yaml.safe_load(row[path.stem]))
    return found


def read_trackio(folder):
    (path,) = folder.glob("trackio/project.db")
    with sqlite3.connect(path) as database:
        ((config,),) = database.execute("select config from configs").fetchall()
        found = Found(json.loads(config))
        for step, metrics in database.execute("select step, metrics from metrics").fetchall():
            for name, value in json.loads(metrics).items():
                inner = (
                    {f"{name}.{key}": item for key, item in value.items()}
                    if isinstance(value, dict)
                    else {name: value}
                )
                for full, item in inner.items():
                    found.add(full, step, item)
    return found


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (hparams,) = folder.glob("project/project/*/hparams.yml")
    found = Found(yaml.safe_load(hparams.read_text()))
    for name in ("", "group_x"):
        events = EventAccumulator(str(folder / "project/project" / name)).Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                found.add("group.x" if name else tag, event.step, event.value)
        for tag in events.Tags()["tensors"]:
            for event in events.Tensors(tag):
                found.add(tag.removesuffix("/text_summary"), event.step, event.tensor_proto.string_val[0].decode())
        for tag in events.Tags()["images"]:
            for event in events.Images(tag):
                found.add_image(io.BytesIO(event.encoded_image_string))
    return found


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Point every library's folders below one folder, and refuse connections that leave the machine."""
    home = (
        "HOME XDG_CONFIG_HOME XDG_CACHE_HOME HF_HOME WANDB_CACHE_DIR WANDB_CONFIG_DIR WANDB_DATA_DIR SWANLAB_SAVE_DIR"
    )
    home += " DVC_SITE_CACHE_DIR DVC_GLOBAL_CONFIG_DIR DVC_SYSTEM_CONFIG_DIR"
    folders = dict.fromkeys(home.split(), "home") | {
        "CLEARML_CACHE_DIR": "clearml",
        "CLEARML_CONFIG_FILE": "none.conf",
        "COMET_OFFLINE_DIRECTORY": "comet",
        "GIT_CEILING_DIRECTORIES": ".",
        "TRACKIO_DIR": "trackio",
        "WANDB_DIR": ".",
    }
    switches = {
        "CLEARML_OFFLINE_MODE": "1",
        "COMET_AUTO_LOG_ENV_DETAILS": "false",
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_ERROR_TRACKING_ENABLE": "false",
        "DVC_NO_ANALYTICS": "1",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    for name, value in {**{name: str(tmp_path / folder) for name, folder in folders.items()}, **switches}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    connect, reached = socket.socket.connect, []

    def guarded(self, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            reached.append(address)
            raise OSError(f"the test is offline: {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    yield tmp_path
    assert reached == []


# What is passed to the library's start, to its `log_images`, and how what it wrote is read.
LIBRARIES = {
    "aim": ({"system_tracking_interval": None}, [IMAGE], {}, read_aim),
    "clearml": ({"auto_connect_frameworks": False, "auto_resource_monitoring": False}, [IMAGE], {}, read_clearml),
    "comet_ml": ({"online": False}, None, {}, read_comet_ml),
    "dvclive": ({"dir": "live", "save_dvc_exp": False}, None, {}, read_dvclive),
    "mlflow": ({}, None, {}, read_mlflow),
    "swanlab": ({"mode": "offline", "logdir": "runs"}, [[IMAGE]], {}, read_swanlab),
    "tensorboard": ({}, [IMAGE[None]], {"dataformats": "NHWC"}, read_tensorboard),
    "trackio": ({"embed": False}, None, {}, read_trackio),
    "wandb": ({}, [[IMAGE]], {}, read_wandb),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_real_run_is_read_back(name, offline):
    library = pytest.importorskip(name)
    if name == "clearml":  # rather than look for the repository's imports, for which it waits up to 300 seconds
        library.Task.force_requirements_env_freeze(requirements_file=__file__)
    options, images, image_options, read = LIBRARIES[name]
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=offline / "project")
    accelerator.init_trackers("project", config=CONFIG, init_kwargs={name: options})
    for step in STEPS:
        values = {"loss": 0.5 + step, "eval_loss": torch.tensor(1.5 * step), "note": f"text {step}"}
        accelerator.log({**values, "group": {"x": 2.0 * step}}, step=step)
    tracker = accelerator.get_tracker(name)
    assert hasattr(tracker, "log_images") == (images is not None)
    if images:
        tracker.log_images({"picture": images[0]}, step=4, **image_options)
    if hasattr(tracker, "log_table"):
        tracker.log_table("table", columns=["a", "b"], data=ROWS, step=4)
    accelerator.end_training()

    found = read(offline)
    expected = {"loss": {0: 0.5, 2: 2.5, 4: 4.5}, "eval_loss": {0: 0.0, 2: 3.0, 4: 6.0}}
    if name in TEXTS:
        expected["note"] = {step: f"text {step}" for step in STEPS}
    if name in GROUPS:
        expected["group.x"] = {0: 0.0, 2: 4.0, 4: 8.0}
    assert {key: found.logged.get(key) for key in expected} == expected
    assert {key: found.config.get(key) for key in CONFIG} == {**CONFIG, "path": "p/q"}
    assert [image.shape for image in found.images] == [IMAGE.shape] * bool(images)
    assert all(np.allclose(image, IMAGE, atol=2) for image in found.images)
    assert found.table == (ROWS if hasattr(tracker, "log_table") else None)
