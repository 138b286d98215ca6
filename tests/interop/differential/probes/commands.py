"""Comparisons of the commands next to `accelerate launch`: what they parse, print as data, and write."""

import argparse
import io
import json
import os
import shlex
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import yaml

from accelerate.commands import accelerate_cli, env, estimate, merge, to_fsdp2, tpu
from accelerate.commands import test as test_command
from accelerate.commands.config import config as config_module
from accelerate.commands.config import get_config_parser
from accelerate.commands.config import main as config_main
from interop.differential.core import Words, call, probe, words
from interop.differential.probes.configs import HEAD

PARSERS = {
    "env": env.env_command_parser, "estimate": estimate.estimate_command_parser, "merge": merge.merge_command_parser,
    "test": test_command.test_command_parser, "tpu": tpu.tpu_command_parser,
    "to_fsdp2": to_fsdp2.to_fsdp2_command_parser, "config": get_config_parser,
}  # fmt: skip
OWN = {"nondefault", "func", "json", "num_processes", "strategy", "overwrite"}
PARSED = [
    "env:env_command_parser", "estimate:estimate_command_parser", "merge:merge_command_parser",
    "test:test_command_parser", "tpu:tpu_command_parser", "to_fsdp2:to_fsdp2_command_parser",
    "config:get_config_parser", "config.config:config_command_parser", "config.default:default_command_parser",
    "config.update:update_command_parser",
]  # fmt: skip
LINES = {
    "env": ["", "--config_file f", "--config f", "--config-file f", "x", "--config_file"],
    "estimate": [
        "", "m", "m --library_name timm", "m --library_name transformers", "m --library_name x",
        "m --library_name TIMM", "a b", "--trust_remote_code m", "m --dtypes float32", "m --dtypes float32 int8",
        "m --dtypes int4 float16", "m --dtypes", "m --dtypes what", "m --dtypes FLOAT32", "m --trust-remote-code",
        "m --library-name timm", "m --dtypes float32 float32",
    ],
    "merge": [
        "", "a", "a b", "a b c", "a b --unsafe_serialization", "a b --remove_checkpoint_dir",
        "a b --unsafe-serialization", "--remove_checkpoint_dir a b",
    ], "test": ["", "--config_file f", "--config f", "x"],
    "tpu": [
        "", "--command echo", "--command echo hi --command b", "--command", "--tpu_name n --tpu_zone z", "--use_alpha",
        "--debug", "--command_file f", "--install_accelerate", "--install_accelerate --accelerate_version 1.0",
        "--accelerate_version latest", "--config_file f", "--tpu-name n", "--what",
    ],
    "to_fsdp2": [
        "", "--config_file f", "--config_file f --output_file g", "--config_file f --overwrite", "--output_file g",
        "--config-file f --output-file g",
    ],
    "config": [
        "", "--config_file f", "default", "default --config_file f", "default --mixed_precision fp16",
        "default --mixed_precision bf16", "default --mixed_precision fp8", "default --mixed_precision what",
        "default --mixed_precision FP16", "update", "update --config_file f", "--config_file f update",
        "--config_file f default", "what", "update x", "default --mixed-precision no",
    ],
}  # fmt: skip


@probe(
    *(f"commands.{name}" for name in PARSED),
    given=Words([f"{name} {line}" for name, lines in LINES.items() for line in lines]),
)
def lines(given):
    name, _, line = given.partition(" ")
    args = PARSERS[name]().parse_args(line.split())
    return {k: v for k, v in sorted(vars(args).items()) if k not in OWN}


MAINS = {
    "cli": accelerate_cli.main, "env": env.main, "estimate": estimate.main, "merge": merge.main,
    "test": test_command.main, "tpu": tpu.main, "config": config_main, "config.config": config_module.main,
}  # fmt: skip


@probe(
    *(f"commands.{name}:main" for name in ("env", "estimate", "merge", "test", "tpu", "config", "config.config")),
    name=list(MAINS), line=["--help", "--what"],
)  # fmt: skip
def mains(name, line):
    sys.argv[:] = [name, line]
    try:
        return MAINS[name]()
    except SystemExit as end:
        return bool(end.code)


call(
    "commands.estimate:add_timm_hub_prefix", "timm_prefix",
    name=["a", "a/b", "timm/a", "hf-hub:a", "hf-hub:a/b", "", "/", "a/b/c", "ü/x"],
)  # fmt: skip
call(
    "commands.estimate:estimate_training_usage", "training_usage", size=[0, 1, 100, 1.5, 10**12],
    precision=words("float32 float16 bfloat16 int8 int4 no fp16 bf16 mixed_fp8 FLOAT32", "", None), msamp=[None, "O1", "O2"],
)  # fmt: skip
call(
    "commands.estimate:create_ascii_table", "table",
    headers=[["a"], ["a", "bb"], ["dtype", "Largest Layer", "Total"], ["a", ""]],
    rows=[[], [["x", "1"]], [["x", "1", "2"], ["longer", "1.5 GB", "-"]], [["ü", "中"]], [["x"]]],
    title=["T", "A title that is longer than the table", ""],
)  # fmt: skip


@probe("commands.estimate:verify_on_hub", repo=["a/b", "no-such-model-at-all", ""], token=[None, "t"])
def on_hub(repo, token):
    return estimate.verify_on_hub(repo, token)


def bert():
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 10, "max_position_embeddings": 8,
    }  # fmt: skip
    os.makedirs("tiny", exist_ok=True)
    Path("tiny/config.json").write_text(json.dumps(config))


def on_the_hub(library):
    info = types.SimpleNamespace(
        library_name=library, tags=[library], config={"architectures": ["BertModel"], "model_type": "bert"},
        siblings=[], sha="1",
    )  # fmt: skip
    return mock.patch.object(estimate, "verify_on_hub", lambda *_, **__: info)


@probe(
    "commands.estimate:create_empty_model", slow=True, library=words("transformers timm TRANSFORMERS what", "", None),
    found=["transformers", "timm", "keras", None],
)  # fmt: skip
def empty_model(library, found):
    bert()
    with on_the_hub(found):
        model = estimate.create_empty_model("tiny", library)
    return [type(model).__name__, {k: [list(v.shape), v.device.type] for k, v in model.state_dict().items()}]


@probe(
    "commands.estimate:gather_data", "commands.estimate:estimate_command", slow=True,
    dtypes=["float32", "float16", "int8", "int4", "float32 int4", "float32 float16 int8 int4"],
)  # fmt: skip
def gathered(dtypes):
    bert()
    args = estimate.estimate_command_parser().parse_args(
        ["tiny", "--library_name", "transformers", "--dtypes", *dtypes.split()]
    )
    with on_the_hub("transformers"):
        for row in estimate.gather_data(args):
            yield f"{row[0]} sizes", row[1:3]
            yield f"{row[0]} training", row[3]
        out = io.StringIO()
        with redirect_stdout(out):
            yield "returns", estimate.estimate_command(args)
    yield "printed", [word in out.getvalue() for word in dtypes.split()]


@probe("commands.env:env_command", config=[None, "f.yaml", "f.json", "missing.yaml", "broken.yaml"])
def environment(config):
    content = {**HEAD, "mixed_precision": "bf16", "use_cpu": True}
    Path("f.yaml").write_text(yaml.safe_dump(content))
    Path("f.json").write_text(json.dumps(content))
    Path("broken.yaml").write_text("a: [1")
    out = io.StringIO()
    with redirect_stdout(out):
        found = env.env_command(argparse.Namespace(config_file=config))
    for key in ("Platform", "Python version", "Numpy version", "PyTorch version", "System RAM"):
        yield key, found[key]
        yield f"{key} printed", str(found[key]) in out.getvalue()
    yield "names", sorted(k for k in found if k.startswith("`Accelerate`") and "config" not in k.lower())


TPU_LINES = [
    "--command ls", "--command ls --command pwd", "--command_file c.txt", "--command_file none.txt", "",
    "--command ls --use_alpha", "--install_accelerate", "--install_accelerate --accelerate_version 1.2.0",
    "--install_accelerate --accelerate_version latest --command ls", "--accelerate_version 1.2.0 --command ls",
    "--install_accelerate --accelerate_version dev", "--config_file f.yaml --command ls", "--config_file f.yaml",
    "--config_file g.yaml",
]  # fmt: skip


@probe("commands.tpu:tpu_command_launcher", line=TPU_LINES, place=["--tpu_name n --tpu_zone z", "--tpu_name n", ""])
def tpu_command(line, place):
    """Give the command that would run, without what quotes it."""
    Path("c.txt").write_text("ls\npwd\n")
    pod = {**HEAD, "distributed_type": "XLA", "tpu_name": "fn", "tpu_zone": "fz"}
    Path("f.yaml").write_text(yaml.safe_dump(pod))
    Path("g.yaml").write_text(yaml.safe_dump({**pod, "command_file": "c.txt", "commands": ["a", "b"]}))
    args = tpu.tpu_command_parser().parse_args([*line.split(), *place.split(), "--debug"])
    out = io.StringIO()
    with redirect_stdout(out):
        tpu.tpu_command_launcher(args)
    text = out.getvalue()
    words = shlex.split(text[text.index("gcloud") :])
    return " ".join(words)


@probe("commands.test:test_command", slow=True)
def tested():
    Path("f.yaml").write_text(yaml.safe_dump({**HEAD, "use_cpu": True, "num_processes": 1}))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return test_command.test_command(argparse.Namespace(config_file="f.yaml"))
