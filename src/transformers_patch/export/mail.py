"""Patches that `git am` applies, written from the old and the new text of files, without a repository."""

import difflib
import hashlib
import math
import re
from datetime import datetime
from email.header import Header
from email.utils import format_datetime, parseaddr

from transformers_patch.export.sources import SourceTree

# `git format-patch` writes this moment into every first line, so that tools know the file for a patch and not for mail.
_ENVELOPE = "From " + "0" * 40 + " Mon Sep 17 00:00:00 2001"
# Lines that end the message for `git am`, because a patch or another mail could begin with them.
_ENDS_MESSAGE = re.compile(r"^(---( |$)|diff -|Index: |From )", re.M)
_CONTEXT = 3


def patch(tree: SourceTree, files: dict[str, str], *, subject: str, message: str, author: str, date: datetime) -> str:
    """Return a patch that `git am` turns into one commit; equal arguments give equal text.

    Args:
        tree: The tree as it is.
        files: The new text of each changed and each new file, by its path from the root.
        subject: The first line of the commit message.
        message: The rest of it; may be empty.
        author: `Name <address>`.
        date: The author's date, with a time zone.

    Raises:
        ValueError: The author is not of that form, the date has no zone, the subject is not one line of ASCII, the
            message has a line that `git am` would take for the patch, or nothing changes.
    """
    _check_words(subject, message, date)
    diffs = [_diff(tree, path, files[path]) for path in sorted(files)]
    changed = [(path, text) for path, text in zip(sorted(files), diffs, strict=True) if text]
    if not changed:
        raise ValueError("nothing changes: every file already has the text that it should get")
    parts = [
        _ENVELOPE,
        f"From: {_address(author)}",
        f"Date: {format_datetime(date)}",
        f"Subject: [PATCH] {subject}",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=UTF-8",
        "Content-Transfer-Encoding: 8bit",
        "",
        *([message.strip("\n")] if message.strip() else []),
        "---",
        _summary(tree, changed),
        "",
    ]
    return "\n".join(parts) + "".join(text for _, text in changed) + "-- \ntransformers_patch\n\n"


def _check_words(subject: str, message: str, date: datetime) -> None:
    if "\n" in subject or not subject.isascii() or not subject.strip():
        raise ValueError(f"the subject has to be one line of ASCII, not {subject!r}")
    if found := _ENDS_MESSAGE.search(message):
        raise ValueError(
            f"a line of the commit message starts with {found[0]!r}, where `git am` would end the message"
        )
    if date.tzinfo is None:
        raise ValueError(f"date={date.isoformat()} has no time zone; write for example {date.isoformat()}+00:00")


def _address(author: str) -> str:
    name, address = parseaddr(author)
    if not name or "@" not in address or "\n" in author:
        raise ValueError(f'author={author!r} is not of the form "Name <name@example.org>"')
    written = name if name.isascii() else Header(name, "utf-8").encode()
    return f"{written} <{address}>"


def _lines(text: str) -> list[str]:
    # git ends lines at "\n" alone; `splitlines` would also break them at a form feed or at U+2028.
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _blob(text: str) -> str:
    data = text.encode("utf-8")
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _diff(tree: SourceTree, path: str, new: str) -> str:
    known = tree.exists(path)
    old = tree.read(path) if known else ""
    if known and old == new:
        return ""
    mode = "100755" if tree.executable(path) else "100644"
    before, after = (_blob(old) if known else "0" * 40), _blob(new)
    head = [f"diff --git a/{path} b/{path}\n"]
    head += (
        [f"index {before}..{after} {mode}\n"] if known else [f"new file mode {mode}\n", f"index {before}..{after}\n"]
    )
    names = (f"a/{path}" if known else "/dev/null", f"b/{path}")
    hunks = difflib.unified_diff(_lines(old), _lines(new), *names, n=_CONTEXT)
    return "".join(head) + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in hunks
    )


def _counts(diff: str) -> tuple[int, int]:
    # The first lines name the files and start with the same signs as the changes do.
    body = diff.partition("\n@@")[2]
    return len(re.findall(r"^\+", body, re.M)), len(re.findall(r"^-", body, re.M))


def _summary(tree: SourceTree, changed: list[tuple[str, str]]) -> str:
    width = max(len(path) for path, _ in changed)
    rows, added, removed = [], 0, 0
    for path, diff in changed:
        plus, minus = _counts(diff)
        added, removed = added + plus, removed + minus
        scale = min(1.0, 40 / max(1, plus + minus))
        signs = "+" * math.ceil(plus * scale) + "-" * math.ceil(minus * scale)
        rows.append(f" {path:<{width}} | {plus + minus} {signs}")
    files = f" {len(changed)} file{'s' * (len(changed) != 1)} changed"
    plus = f", {added} insertion{'s' * (added != 1)}(+)" if added else ""
    minus = f", {removed} deletion{'s' * (removed != 1)}(-)" if removed else ""
    created = [f" create mode 100644 {path}" for path, _ in changed if not tree.exists(path)]
    return "\n".join([*rows, files + plus + minus, *created])
