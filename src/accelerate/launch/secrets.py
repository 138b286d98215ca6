"""Names of variables and options whose values are not to be printed."""

_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_HIDDEN = "(hidden)"


def is_secret(name: str) -> bool:
    """Tell whether a variable or an option of this name holds a secret.

    Args:
        name: in any case, with underscores or hyphens.

    Example:
        >>> [is_secret(name) for name in ("HF_TOKEN", "aws-secret-access-key", "WANDB_APIKEY", "MONKEY", "TOKENIZERS_PARALLELISM")]
        [True, True, True, False, False]
    """
    words = name.upper().replace("-", "_").split("_")
    return any(word in _WORDS or word.endswith(("APIKEY", *_WORDS[1:])) for word in words)


def shown(name: str, value: str) -> str:
    """Return a value as it may be printed.

    Args:
        name: the variable or the option.
        value: its value.
    """
    return _HIDDEN if value and is_secret(name) else value
