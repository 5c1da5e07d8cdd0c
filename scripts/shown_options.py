"""For the reference in docs/: show the options of each entrance, as `help` does.

mkdocstrings reads source text, in which an entrance takes ``**options``. The function alone knows
what `streamload.loading.options.takes` makes of that.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from griffe import Docstring, Extension, Function, Parameter, ParameterKind, Parameters


class ShownOptions(Extension):
    """Takes parameters and docstrings of functions under `takes` from the functions themselves."""

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        """Called for each function that was read."""
        if not any(str(d.value).partition("(")[0] == "takes" for d in func.decorators):
            return
        try:
            entrance = getattr(importlib.import_module(func.module.path), func.name)
        except ImportError:  # its framework is not installed: it is shown as it is written
            return
        written = {parameter.name: parameter.annotation for parameter in func.parameters}
        func.parameters = Parameters(
            *(
                Parameter(
                    each.name,
                    annotation=written.get(each.name),
                    kind=ParameterKind(each.kind.description),
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in inspect.signature(entrance).parameters.values()
            )
        )
        func.docstring = Docstring(inspect.getdoc(entrance) or "", parent=func)
