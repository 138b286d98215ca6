"""For the site: sections called `Example:` in docstrings are read as examples, and shown as code, not as quotations."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Give each such section the name that the parser of Google's style knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the text of one object's docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
