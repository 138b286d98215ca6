"""Python blocks of the pages: those that stand alone run, one after the other, and `# yours:` names what the others need."""

import ast
import builtins
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
RUN = ["README.md", "docs/quickstart.md", "docs/guides/data.md", "docs/guides/big-models.md"]
RUN += ["docs/guides/resume.md", "docs/upstream/double-prepare.md"]
# Pages whose whole programs need several processes, files, or packages; their parts say what they need all the same.
READ = ["docs/faults.md", "docs/guides/launch.md"]
READ += [
    f"docs/guides/{name}.md" for name in ("deepspeed", "estimate-memory", "experts", "long-sequences", "preemption")
]
READ += [f"docs/guides/{name}.md" for name in ("object-stores", "pipeline-inference", "precision", "quantization")]
READ += ["docs/guides/throughput.md"]


def blocks(page):
    found = BLOCK.findall((ROOT / page).read_text("utf-8"))
    assert found, page
    return found


def is_part(block):
    return block.startswith(("# yours:", "# goes into"))


def missing(block):
    """The names that a block reads before it makes or imports them."""
    made, needed = set(dir(builtins)), set()
    for statement in ast.parse(block).body:
        nodes = list(ast.walk(statement))
        read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
        loops = [node.target for node in nodes if isinstance(node, ast.comprehension)]
        read -= {node.id for target in loops for node in ast.walk(target) if isinstance(node, ast.Name)}
        # `model = prepare(model)` needs a model; a loop may make what its body reads.
        needed |= read - made - (set() if isinstance(statement, (ast.Assign, ast.Expr)) else own)
        made |= own
    return needed


@pytest.mark.parametrize("page", [*RUN, *READ])
def test_a_block_says_what_it_needs(page):
    for block in blocks(page):
        first = block.partition("\n")[0]
        if first.startswith("# yours:"):
            assert missing(block) <= set(re.findall(r"\w+", first)), first
        else:
            assert not missing(block), first


@pytest.mark.parametrize("page", RUN)
def test_blocks_that_stand_alone_run(page, place, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names: dict[str, object] = {"__name__": "__main__"}
    ran = [block for block in blocks(page) if not is_part(block)]
    assert ran
    for block in ran:
        exec(compile(block, page, "exec"), names)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: ([\d.]+)$", capsys.readouterr().out, re.M)]
    if page in ("README.md", "docs/quickstart.md"):
        assert len(losses) == 3 and losses[-1] < losses[0] / 10, "it learns"
