"""Count phrases that make a text read as if it had been translated, in pages, docstrings, comments and messages.

    python tools/phrases.py              words, phrases and phrases per thousand words of each file that has any
    python tools/phrases.py --check      exit with 1 if pages or code have more than their limit

The list is that of CONTRIBUTING.md, "How we write".
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Phrases per thousand words.
PAGES_LIMIT, CODE_LIMIT = 0.3, 0.5
# What to write instead of each.
PHRASES = {
    r"go(?:es|ing)? on\b(?! (?:rank|a rank|each|the (?:device|GPU|CPU)))": "resumes, continues",
    r"\bbeside\b(?!`)": "next to, with, compared with",
    r"by itself": "only, automatically",
    r"in vain": "timed out, without effect",
    r"says? so": "warns, reports, raises",
    r"left out|leaves? out": "skipped, omitted",
    r"leave \S+ (?:away|out)": "remove",
    r"\bl(?:ies|ie) (?:in|at|on|beside|there|where|next)\b": "is in, is stored in",
    r"(?:it|they|which|that|loader|run|where \w+) st(?:ands|and|ood)\b(?! (?:for|in for|still))": "is, is at",
    r"mended|repairs? (?:a|the) (?:bug|fault)": "fixed",
    r"by hand": "manually",
    r"of (?:its|their|one's) own(?: \w+)?(?=[ .,;:])": "per-rank, separate, custom",
    r"\b(?:somebody|nobody|whoever|lest)\b": "name the process, rank, caller or user",
    r"let(?:s|ting)? go of": "release, free",
    r"is asked for|are asked for|was asked for": "name the thing",
    r"any rank, alone|all ranks call (?:it|this)": "Not a collective. / Collective: call on every rank.",
    r"say whether": "return whether",
    r"in earnest|\bdear\b|\banew\b|\bafresh\b|therein|thereby": "plain words",
    r"as a whole|the whole of|is whole|are whole|whole (?:tensor|tensors|weights|states?|parameters?)": "full, unsharded",
}
PATTERN = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES), re.I)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the prose of each page that people write: no code and no link targets."""
    names = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"]
    for path in [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text("utf-8"), flags=re.M | re.S)
        yield path.relative_to(ROOT).as_posix(), re.sub(r"`[^`\n]*`|\]\([^)]*\)", "x", text)


def code() -> Iterator[tuple[str, str]]:
    """Yield the path and the docstrings, comments and messages of each module."""
    for folder in ("src", "tools", "benchmarks", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text("utf-8")
            comments = [
                token.string
                for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type == tokenize.COMMENT
            ]
            strings = [
                node.value
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
            ]
            yield path.relative_to(ROOT).as_posix(), "\n".join([*comments, *strings])


def report(kind: str, texts: Iterator[tuple[str, str]], shown: bool) -> float:
    """Print the files of a kind with their phrases; return the phrases per thousand words of all."""
    words = phrases = 0
    for path, text in texts:
        if path == "tools/phrases.py":
            continue
        hits = Counter(re.sub(r"\s+", " ", hit.group().lower()) for hit in PATTERN.finditer(text))
        words, phrases = words + len(text.split()), phrases + hits.total()
        if hits and shown:
            print(f"{path}: {hits.total()}  " + ", ".join(f"{hit} x{count}" for hit, count in hits.most_common(8)))
    rate = 1000 * phrases / max(1, words)
    print(f"{kind}: {phrases} phrases in {words} words, {rate:.2f} per thousand")
    return rate


def main() -> int:
    """Print the counts; return 1 if `--check` finds more than the limits allow."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 above the limits")
    check = parser.parse_args().check
    rates = report("pages", pages(), not check), report("code", code(), not check)
    return int(check and (rates[0] > PAGES_LIMIT or rates[1] > CODE_LIMIT))


if __name__ == "__main__":
    sys.exit(main())
