"""What the pages show: every Python block runs or says why not, settings parse, commands and members exist.

A block that begins with `# Given:` is a part of a program and lists what stands in the reader's already; one that begins with
`# goes into` is a part of a class. Both are compiled and their names resolved. All others of a page run, one after the other.
"""

import ast
import builtins
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import pytest
import yaml

from accelerate import Accelerator
from accelerate.commands.accelerate_cli import commands, parser_of
from accelerate.state import AcceleratorState

ROOT = pathlib.Path(__file__).parents[3]
DOCUMENTS = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.M | re.S)
# Run by another test, which has the processes, the fixture or the package that they need.
ELSEWHERE = {
    "docs/guides/experts.md": "tests/distributed/test_pages.py",
    "docs/guides/fsdp.md": "tests/unit/strategies/test_guides.py",
    "docs/guides/fsdp2-migration.md": "tests/unit/strategies/test_guides.py",
    "docs/guides/weights.md": "tests/unit/strategies/test_guides.py",
    "docs/guides/long-sequences.md": "tests/distributed/test_pages.py",
    "docs/guides/pipeline-training.md": "tests/distributed/test_pages.py",
    "docs/guides/sharded-models.md": "tests/unit/strategies/test_guides.py",
    "docs/guides/tensor-parallel.md": "tests/unit/strategies/test_guides.py",
    "docs/upstream/state-reset.md": "tests/interop/test_upstream.py",
    "docs/guides/extensions.md": "tests/distributed/test_extension.py",
}
# Run in a separate process, because they start processes or change classes for all; and the package that they need.
ALONE = {
    "docs/faults.md": "transformers",
    "docs/guides/launch.md": "torch",
    "docs/guides/platforms.md": "torch",
    "docs/guides/precision.md": "torchao",
    "docs/switch.md": "transformers",
    "docs/transformers-patch.md": "transformers",
    "docs/transformers-checkpoints.md": "transformers",
}
# Written by programs from the option table, the docstrings and measurements.
WRITTEN = {
    "docs/reference.md",
    "docs/reference/cli.md",
    "docs/benchmarks.md",
    "docs/gpu.md",
    "docs/scale.md",
    "docs/reference/differences.md",
}
PAGES = 65
# Reference and notes, where a member in a list is not taught.
NO_TEACHERS = {"differences", "architecture", "support", "benchmarks", "scale", "cli"}


def blocks(page, language):
    text = (ROOT / page).read_text("utf-8")
    return [textwrap.dedent(body) for _, kind, body in FENCE.findall(text) if kind == language]


def anchors(path):
    """The names of the headings of a page, as links spell them."""
    text = re.sub(r"^(```).*?^\1", "", path.read_text("utf-8"), flags=re.M | re.S)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in re.findall(r"^#+ (.+)", text, re.M)]
    return {re.sub(r"\s", "-", each) for each in words}


def is_part(block):
    return block.startswith(("# Given:", "# goes into"))


def names_of(statement):
    """What one statement reads, and what it makes or imports."""
    nodes = list(ast.walk(statement))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    loops = [node.target for node in nodes if isinstance(node, ast.comprehension)]
    return read - {node.id for target in loops for node in ast.walk(target) if isinstance(node, ast.Name)}, own


def missing(block, made):
    """The names that a block reads before it makes or imports them."""
    made, needed = set(dir(builtins)) | made, set()
    for statement in ast.parse(block).body:
        read, own = names_of(statement)
        # `model = prepare(model)` needs a model; a loop may make what its body reads.
        needed |= read - made - (set() if isinstance(statement, (ast.Assign, ast.Expr)) else own)
        made |= own
    return needed


LANGUAGES = {"python", "diff", "bash", "console", "json", "yaml", "text", "toml"}
PYTHON = [page for page in DOCUMENTS if blocks(page, "python")]
RUN = [page for page in PYTHON if page not in ELSEWHERE and page not in ALONE]


def test_exceptions_are_about_pages_that_have_blocks():
    assert {*ALONE, *ELSEWHERE} <= set(PYTHON), "their reasons are stale"
    for page, test in ELSEWHERE.items():
        assert pathlib.Path(page).stem in (ROOT / test).read_text("utf-8")


def test_every_block_says_its_language():
    for page in DOCUMENTS:
        fences = re.findall(r"^ *```(\w*)", (ROOT / page).read_text("utf-8"), re.M)
        assert set(fences[::2]) <= LANGUAGES and not any(fences[1::2]), page


@pytest.mark.parametrize("page", PYTHON)
def test_a_block_says_what_it_needs(page):
    made = set()
    for block in blocks(page, "python"):
        compile(block, page, "exec")
        first = block.partition("\n")[0]
        if first.startswith("# Given:"):
            # What stands above on the page may be listed all the same.
            assert missing(block, set()) <= set(re.findall(r"\w+", first)) | made, first
        elif not first.startswith("# goes into"):
            assert not missing(block, made), first
            made |= {name for statement in ast.parse(block).body for name in names_of(statement)[1]}


@pytest.mark.parametrize("page", RUN)
def test_blocks_run_one_after_the_other(page, place, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        if not is_part(block):
            if "Accelerator(" in block:  # as a separate program; what was built above lives on
                AcceleratorState._reset_state(reset_partial_state=True)
            exec(compile(block, page, "exec"), names)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: ([\d.]+)$", capsys.readouterr().out, re.M)]
    if page in ("README.md", "docs/learn/training-loop.md", "docs/learn/resume.md"):
        assert len(losses) == 3 and losses[-1] < losses[0] / 10, "it learns"
    if page == "docs/guides/checkpointing.md":
        assert (place / "runs/first/checkpoints/checkpoint_2/accelerate_manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", ALONE)
def test_blocks_run_in_a_process_of_their_own(page, tmp_path):
    pytest.importorskip(ALONE[page])
    whole = [block for block in blocks(page, "python") if not is_part(block)]
    (tmp_path / "page.py").write_text("\n".join(whole))
    (tmp_path / "train.py").write_text("")  # what a page starts
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if blocks(page, "yaml") or blocks(page, "json")])
def test_settings_parse(page):
    for block in blocks(page, "yaml"):
        assert yaml.safe_load(block) is not None
    for block in blocks(page, "json"):
        json.loads(block)


def typed(console):
    """The commands of a session in a terminal, without what they print."""
    return "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", console, re.M))


def test_commands_are_shell_and_their_options_exist():
    known = {}
    for name in commands():
        known[name] = {option for action in parser_of(name)._actions for option in action.option_strings}
    found, texts = [], []
    for page in DOCUMENTS:
        shell = blocks(page, "bash")
        texts += shell
        for block in [*shell, *map(typed, blocks(page, "console"))]:
            for line in block.replace("\\\n", " ").splitlines():
                if (
                    command := re.search(r"(?:^|[ ;(])accelerate ([a-z][a-z0-9-]*) (.*)", line.partition(" #")[0])
                ) is None:
                    continue
                options = known.get(command[1])
                words = [] if options is None else command[2].split()
                found += [f"{page}: {line}"] if options is None else []
                for word in words:
                    if re.search(r"\.py\b|^-m$|^\.\.\.", word) or command[1] in ("config", "checkpoint"):
                        break  # what follows belongs to the script, or to a command below this one
                    name = word.partition("=")[0]
                    if re.fullmatch(r"--[a-z0-9_-]+", name) and not options & {name, name.replace("-", "_")}:
                        found.append(f"{page}: {name}")
    assert not found, "\n".join(found)
    quoted = "\n".join(f"bash -n -c {shlex.quote(text)} || exit 1" for text in texts)
    checked = subprocess.run(["bash", "-c", quoted], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_programs_that_pages_show_print_what_their_docstrings_promise():
    shown = 0
    for page in DOCUMENTS:
        section = (ROOT / page).read_text("utf-8").partition("\n## The whole program")[2]
        for said in re.finditer(r"^\$ (.*examples/(\S+\.py).*)\n\.\.\.\n([^$].+)$", section, re.M):
            command, program, last = said.groups()
            promise = ast.get_docstring(ast.parse((ROOT / "examples" / program).read_text("utf-8")))
            assert f"    {command}" in promise and f"Prints: {last}" in promise, (page, command, last)
            shown += 1
    assert shown > 30


def test_pages_are_few_and_each_kind_has_its_tab():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    kinds = {kind: re.findall(r"[\w/-]+\.md", str(tree)) for tab in settings["nav"] for kind, tree in tab.items()}
    listed = [f"docs/{page}" for pages in kinds.values() for page in pages]
    assert sorted(listed) == sorted(set(DOCUMENTS) - {"README.md"}), "each page stands once in the navigation"
    assert set(listed) >= WRITTEN and len(set(listed)) <= PAGES
    for page in kinds["Guides"]:
        headings = re.findall(r"^## (.+)", (ROOT / "docs" / page).read_text("utf-8"), re.M)
        assert headings[-1].startswith("The whole program"), f"{page} does not end with a program"
    moved = next(each["redirects"]["redirect_maps"] for each in settings["plugins"] if "redirects" in each)
    for old, new in moved.items():
        path, _, fragment = new.partition("#")
        assert not (ROOT / "docs" / old).exists() and (not fragment or fragment in anchors(ROOT / "docs" / path)), old


def test_every_example_is_named_on_a_page():
    texts = "\n".join((ROOT / page).read_text("utf-8") for page in DOCUMENTS)
    files = [path for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = [path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".md"]
    lost = sorted(name for name in names if name not in texts)
    assert len(files) > 50 and lost == [], "no page names these"


def test_every_member_of_the_accelerator_is_taught():
    teachers = [page for page in DOCUMENTS if pathlib.Path(page).stem not in NO_TEACHERS]
    texts = [(ROOT / page).read_text("utf-8") for page in teachers]
    texts += [path.read_text("utf-8") for path in sorted((ROOT / "examples").rglob("*.py"))]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    members = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert len(members) >= 95
    assert sorted(members - words) == [], "no guide and no example shows these"


def test_pictures_are_there_for_light_and_dark_pages():
    for page in DOCUMENTS:
        shown = re.findall(r"!\[[^\]]*\]\(([^)\s#]+)", (ROOT / page).read_text("utf-8"))
        missing_files = [name for name in shown if not ((ROOT / page).parent / name).exists()]
        assert not missing_files, page
        for name in shown:
            word, other = ("-light", "-dark") if "-light.svg" in name else ("-dark", "-light")
            assert name.replace(f"{word}.svg", f"{other}.svg") in shown, f"{page}: {name} alone"


def test_each_difference_has_a_reason_and_the_page_is_generated():
    twenty = re.findall(r"^\| (?!here \|)(.*) \|$", (ROOT / "docs/differences.md").read_text("utf-8"), re.M)
    assert len(twenty) == 20 and all(len(row.split(" | ")) == 3 for row in twenty)
    subjects = yaml.safe_load((ROOT / "docs/differences.yaml").read_text("utf-8"))["subjects"]
    rows = [row for subject in subjects for row in subject["rows"]]
    assert all(row["here"] and row["reason"] for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    assert subprocess.run([sys.executable, "tools/differences.py", "--check"], cwd=ROOT).returncode == 0
