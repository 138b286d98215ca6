"""What the text of the project must and must not contain."""

import ast
import os
import pathlib
import re
from collections.abc import Iterable, Iterator

import pytest

from architecture import source

# All files are parsed once.
pytestmark = pytest.mark.xdist_group("syntax trees")

CODE = [*source.files("accelerate"), *source.files("transformers_patch")]
PROGRAMS = [*CODE, *(p for d in ("examples", "benchmarks", "tools") for p in sorted((source.ROOT / d).rglob("*.py")))]
TEXTS = {".py", ".md", ".json", ".yml", ".yaml", ".toml", ".txt", ".cfg", ".sh", ".ini", ".csv", ""}
OUTSIDE = re.compile(r"\.git|\.cache|\.venv.*|site|build|dist|\.demo|\.?\w*_+cache_*|\.hypothesis|.*\.egg-info")
# An absolute path below somebody's home, work or temporary folder. A variable or a URL in front makes it no such path.
MACHINE_PATH = re.compile(r"(?<![\w/.~$})>*-])/(?:home|root|work|workspace|mnt|Users|tmp)/[\w.]+")
MACHINE_HOST = re.compile(r"\b[\w-]+\.(?:internal|corp|lan|intranet)\b(?!\s*[(=.])")
# The two places that may tell one kind of distribution from another; everybody else asks a trait.
TYPE_TESTERS = {"accelerate/config/strategies.py"}


# Processes of one run send each other objects, as torch's own collectives do; they trust each other with everything anyway.
UNPICKLERS = {"accelerate/extensions/notebook/processes.py", "accelerate/extensions/operation_checks/communicator.py"}


def relative(path: pathlib.Path) -> str:
    """Return a path as it is written in messages."""
    return path.relative_to(source.SRC if source.SRC in path.parents else source.ROOT).as_posix()


def nodes(paths: Iterable[pathlib.Path], *words: str) -> Iterator[tuple[pathlib.Path, ast.AST]]:
    """Return the syntax of those files that contain one of the words: few have to be parsed."""
    for path in paths:
        text = path.read_text("utf-8")
        if any(word in text for word in words):
            yield from ((path, node) for node in ast.walk(source.tree(path)))


def project_texts() -> Iterator[pathlib.Path]:
    """Return every text file that belongs to the project."""
    for folder, inside, names in os.walk(source.ROOT):
        # Environments, of 100,000 files, are not walked.
        inside[:] = [name for name in inside if not OUTSIDE.fullmatch(name)]
        paths = [pathlib.Path(folder, name) for name in names if not OUTSIDE.fullmatch(name)]
        yield from (path for path in paths if path.suffix in TEXTS and path.is_file())


def test_no_path_or_host_of_a_machine():
    found = []
    for path in project_texts():
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            for match in (MACHINE_PATH.search(line), MACHINE_HOST.search(line)):
                if match:
                    found.append(f"{relative(path)}:{number}: {match[0]}")
    assert not found, "\n" + "\n".join(found)


def test_source_claims_nobody_elses_copyright():
    claimed = [relative(p) for p in CODE if re.search(r"Copyright\b.*Hugging\s?Face", p.read_text("utf-8"), re.I)]
    assert claimed == []


def names_a_type(node: ast.AST) -> bool:
    """Return whether an expression names a member of DistributedType, alone or inside a container."""
    return any(
        isinstance(part, ast.Attribute) and ast.unparse(part.value).rpartition(".")[2] == "DistributedType"
        for part in ast.walk(node)
    )


def asks_for_the_type(node: ast.AST) -> bool:
    """Return whether an expression reads some object's `distributed_type`."""
    return isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node).rpartition(".")[2] == "distributed_type"


def compares_types(node: ast.Compare) -> bool:
    """Return whether a comparison tells one kind of distribution from another."""
    operands = [node.left, *node.comparators]
    if any(names_a_type(operand) for operand in operands):
        return True
    literal = any(
        isinstance(part, ast.Constant) and isinstance(part.value, str) for o in operands for part in ast.walk(o)
    )
    # `"distributed_type" in state` looks a key up; only the attribute against a word is a disguised comparison.
    return literal and any(asks_for_the_type(operand) for operand in operands)


def test_distributed_type_is_compared_in_one_place_only():
    found = []
    others = [path for path in CODE if relative(path) not in TYPE_TESTERS]
    for path, node in nodes(others, "DistributedType", "distributed_type"):
        if isinstance(node, ast.Compare) and compares_types(node):
            found.append(f"{relative(path)}:{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Match) and any(names_a_type(case.pattern) for case in node.cases):
            found.append(f"{relative(path)}:{node.subject.lineno}: match")
    assert not found, "ask config.strategies.traits_of instead:\n" + "\n".join(found)


def test_comparisons_are_recognised():
    def seen(text: str) -> bool:
        return compares_types(ast.parse(text, mode="eval").body)

    assert seen("state.distributed_type == DistributedType.NO")
    assert seen("kind in (DistributedType.FSDP, enums.DistributedType.NO)")
    assert seen("self.distributed_type == 'MULTI_GPU'")
    assert not seen("'distributed_type' in vars(state)")
    assert not seen("traits_of(state.distributed_type).xla == 1")


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Return the public functions, classes and methods of a module, with their dotted names."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            yield from public_definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try)):
            yield from public_definitions(node.body, prefix)


def decorators(node: ast.AST) -> set[str]:
    """Return the last words of a definition's decorators."""
    return {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in getattr(node, "decorator_list", [])}


def test_public_names_are_documented_and_typed():
    undocumented = [relative(path) for path in CODE if not ast.get_docstring(source.tree(path))]
    untyped = []
    for path in CODE:
        for name, node in public_definitions(source.tree(path).body):
            where = f"{relative(path)}:{node.lineno} {name}"
            # A setter or an overload repeats a name whose first definition carries the documentation.
            if not ast.get_docstring(node) and not decorators(node) & {"setter", "deleter", "overload", "override"}:
                undocumented.append(where)
            if not isinstance(node, ast.ClassDef) and node.returns is None:
                untyped.append(where)
    assert not undocumented, "no docstring:\n" + "\n".join(undocumented)
    assert not untyped, "no return annotation:\n" + "\n".join(untyped)


UNSAFE = ("shell", "os.system", "os.popen", "yaml", "pickle", "torch.load", "eval", "exec")


def unsafe(node: ast.Call) -> str:
    """Return why a call is not allowed, or an empty string."""
    called = ast.unparse(node.func)
    keywords = {k.arg: k.value for k in node.keywords}
    if "shell" in keywords and ast.unparse(keywords["shell"]) != "False":
        return "a shell string; give a list of arguments"
    if called in ("os.system", "os.popen"):
        return "a shell string; use subprocess with a list of arguments"
    if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        return "use yaml.safe_load"
    if called.rpartition(".")[0] == "pickle" and called.rpartition(".")[2] in ("load", "loads", "Unpickler"):
        return "unpickling runs what the file says"
    if called == "torch.load" and "weights_only" not in keywords and None not in keywords:
        return "say weights_only=True, or False and why"
    if called in ("eval", "exec"):
        return "runs text as code"
    return ""


def test_nothing_is_checked_by_assert_which_an_option_of_python_leaves_out():
    found = [f"{relative(path)}:{node.lineno}" for path, node in nodes(CODE, "assert") if isinstance(node, ast.Assert)]
    assert not found, "raise an error instead:\n" + "\n".join(found)


def test_no_unsafe_call():
    found = [
        f"{relative(path)}:{node.lineno} {ast.unparse(node.func)}: {reason}"
        for path, node in nodes(PROGRAMS, *UNSAFE)
        if isinstance(node, ast.Call) and (reason := unsafe(node))
        if not (relative(path) in UNPICKLERS and "pickle" in ast.unparse(node.func))
    ]
    assert not found, "\n" + "\n".join(found)
