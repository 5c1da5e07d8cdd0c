"""For docs/: put the table of options into the page that has its mark; a hook of mkdocs."""

import re
from typing import Any

from streamload.loading.options import OPTIONS


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return a page with the table of options in place of its mark."""
    rows = ["| option | default | |", "|---|---|---|"]
    for name, option in OPTIONS.items():
        parts = re.split("(`[^`]*`)", " ".join(option.lines).replace("``", "`"))
        parts[::2] = [re.sub(r'"[^" ]*"', r"`\g<0>`", text) for text in parts[::2]]
        default = repr(option.default).replace("'", '"')
        rows.append(f"| `{name}` | `{default}` | {''.join(parts)} |")
    return markdown.replace("<!-- options -->", "\n".join(rows))
