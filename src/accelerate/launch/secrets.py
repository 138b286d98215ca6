"""What must not be printed: values by their names, wherever they are, logins in addresses, and tokens by how they begin."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# In a name, underscores separate words: "MONKEY" and "TOKENIZERS" are harmless.
_SECRET = re.compile(
    r"((^|_|API|ACCESS|PRIVATE|ACCOUNT)KEY|TOKEN)(_|$)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTHORIZATION"
    r"|(^|_)(PAT|O?AUTH)$|_PWD$|^SIG$|SIGNATURE$"
)
_INNER_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # where "accountKey" continues
_HARMLESS = "GOOGLE_APPLICATION_CREDENTIALS"  # the path of a file
# No secret consists of these, whatever it is called: `calculate_per_token_loss` is a switch.
_TELLING_NOTHING = frozenset(["", "true", "false", "yes", "no", "0", "1", "none"])
_HIDDEN = "(hidden)"
# NAME=value, NAME: value and NAME is 'value' within a text, such as an entry of `tpu_env` or an error about a file, and
# --name value, as in a command or a list of its words. What is hidden already is passed over.
_ASSIGNED = re.compile(
    r"(?:([A-Za-z_][\w-]*)['\"]?\s*(?:[=:]|\bis\s+['\"])\s*|(?<![^\s'\"])--([A-Za-z][\w-]*)(?:['\"],)?\s+(?!['\"]?-))(?=\S)(?!['\"]?\(hidden\))"
)
_LOGIN = re.compile(r"://[^/@\s]+@")
# Tokens of the Hugging Face Hub, GitHub, GitLab, OpenAI, Slack and AWS, and those of HTTP.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|"
    r"xox[a-z]-[\w-]{8,}|AKIA[A-Z0-9]{16})|(?<=\bBearer )[\w.~+/=-]{8,}"
)


def is_secret(name: str) -> bool:
    """Return whether a variable or an option of this name, in any case, with underscores or hyphens, holds a secret."""
    plain = _INNER_WORD.sub("_", name).upper().replace("-", "_")
    return plain != _HARMLESS and _SECRET.search(plain) is not None


def masked(value: Any, name: str = "") -> Any:
    """Return a value of some name without what must not be published, in itself or anywhere within it.

    In a text all that follows the name of a secret is hidden: only a shell knows where the secret ends.
    """
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(inner, name) for inner in value]
    if value is None or str(value).lower() in _TELLING_NOTHING:
        return value
    if is_secret(name):
        return _HIDDEN
    if not isinstance(value, str):
        return value
    for match in _ASSIGNED.finditer(value):
        if is_secret(match[1] or match[2]) and value[match.end() :].lower() not in _TELLING_NOTHING:
            value = value[: match.end()] + _HIDDEN
            break
    return _TOKEN.sub(_HIDDEN, _LOGIN.sub(f"://{_HIDDEN}@", value))


def command(words: Iterable[str]) -> list[str]:
    """Return a command line as it may be printed."""
    found: list[str] = []
    before = ""
    for word in words:
        flag = before.startswith("--") and "=" not in before and not word.startswith("-")
        found.append(masked(word, before if flag else ""))
        before = word
    return found
