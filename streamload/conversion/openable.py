"""What transformers says of a conversion: which weights a model can hold quantised.

The code that `streamload.transformers.from_pretrained` asks decides here, too. It imports torch and
transformers, which take more memory than a conversion: where this process has not imported them, a
child does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streamload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from streamload.dequantise import dequantised
from streamload.errors import DeviceError, StreamloadError
from streamload.mapping import sources
from streamload.match import wants_of
from streamload.planning.budget import HostMemory
from streamload.quant.group import Packed
from streamload.quantise import QuantPolicy, kinds_of, no_holder
from streamload.units import format_bytes

_NEEDED = ("torch", "transformers")
_CHILD_NBYTES = 2**30  # with transformers and torch imported: 0.6 GB on Linux
_TIMEOUT_S = 300.0
_ROOT = str(Path(__file__).parent.parent.parent)
_LISTED = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is left as it is, and how the rest is opened.

    Attributes:
        left: by tensor that no module can hold quantised, the class of its module.
        modules: modules that transformers' quantiser has to leave as they are to open the others;
            None where it has no modules for these.
        said: the ``quantization_config`` by which streamload alone opens them, or None.
        known: whether there was a model to ask.
        kinds: patterns of the names of what is left.
        notes: sentences for users.
    """

    left: Mapping[str, str] = field(default_factory=dict)
    modules: list[str] | None = None
    said: Mapping[str, Any] | None = None
    known: bool = False
    kinds: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def asked_of_models(checkpoint: Checkpoint, policy: QuantPolicy) -> Verdict | None:
    """Ask which of the weights that are to be quantised modules can hold.

    Returns:
        None where there is no model to ask: no class in config.json, no transformers.

    Raises:
        ValueError: modules can hold none of them.
    """
    if not _is_here(checkpoint):
        return None
    fill, _, _ = sources(checkpoint, None, None)
    found = policy.formats(checkpoint, wants_of(checkpoint, fill))
    tensors = (source.rows[0].tensor for source in fill.values())
    formats = {t: form for t, form in zip(tensors, found, strict=True) if form is not None}
    if not formats:
        return None
    packed = [t.name for t in checkpoint.tensors.values() if isinstance(t, Packed)]
    said = _asked("holding", path=str(checkpoint.path), formats=dict(formats), packed=packed)
    if isinstance(said, str):
        return Verdict(notes=(f"transformers was not asked what it opens: {said}",))
    if said is None:
        return None
    left = said["left"]
    classes = ", ".join(dict.fromkeys(left.values()))
    if left and len(left) == len(formats):
        raise ValueError(no_holder(list(left), said["holders"], classes))
    notes = []
    if left:
        nbytes = sum(checkpoint.tensors[name].nbytes for name in left)
        listed = ", ".join(list(left)[:_LISTED]) + ", ..." * (len(left) > _LISTED)
        notes.append(
            f"not quantised, {len(left)} tensors of {format_bytes(nbytes)}: their modules "
            f"({classes}) open no quantised weights of a checkpoint, though from_pretrained(quant=)"
            f" may quantise them on the way: {listed}"
        )
    kinds = tuple(kinds_of(list(left), [name for name in formats if name not in left]))
    return Verdict(left, said["modules"], said["said"], True, kinds, tuple(notes))


def why_not_opened(folder: Path) -> str:
    """Why `from_pretrained` does not open a folder; "" where it does, or cannot be asked."""
    found = _asked("why_not_opened", path=str(folder))
    return found["why"] if isinstance(found, dict) else ""


def _is_here(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint names a class of transformers, and that is installed."""
    local = isinstance(checkpoint.path, Path)
    return (
        local
        and bool(checkpoint.config.get("architectures"))
        and all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    )


def _is_imported() -> bool:
    """Whether this process has imported what answers."""
    return all(name in sys.modules for name in _NEEDED)


def _asked(question: str, **given: Any) -> Any:
    """What `_answered` says, in this process or in another one; text where nobody can say it."""
    if _is_imported():
        return _answered(question, **given)
    with suppress(DeviceError):
        free_nbytes = HostMemory().available_nbytes()
        if free_nbytes < _CHILD_NBYTES:
            return f"it takes {format_bytes(_CHILD_NBYTES)}, {format_bytes(free_nbytes)} are free"
    code = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
        "from streamload.conversion.openable import answer; answer()"
    )
    paths = [*filter(os.path.isabs, sys.path), _ROOT]  # without the current folder
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, json.dumps(paths)],
            input=json.dumps({"question": question, **given}),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return said[-1] if said else f"exit {done.returncode}"
    return json.loads(lines[-1])


def answer() -> None:
    """Answer the question on the standard input, as the last line of the standard output."""
    print("\n" + json.dumps(_answered(**json.load(sys.stdin))))


def _answered(question: str, path: str, **given: Any) -> Any:
    from streamload.transformers import holding

    if question == "why_not_opened":
        return {"why": holding.why_not_opened(Path(path))}
    try:
        checkpoint = dequantised(open_checkpoint(path), given["packed"])
    except StreamloadError as error:
        return str(error)
    found = holding.holding(checkpoint, given["formats"])
    return None if found is None else asdict(found)
