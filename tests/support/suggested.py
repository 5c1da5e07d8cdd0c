"""Execute the suggestions of errors after the test that raised them.

None gives the same error, none loads codes without scales, and what arrives is what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import streamload
from streamload import errors, open_checkpoint
from streamload.verification.verify import verify

_ENTRANCES: dict[str, Callable[..., Any]] = {
    "load_state_dict": streamload.load_state_dict,
    "plan": streamload.plan,
}
_FIGURES = re.compile(r" \([^()]*\)$")  # how much a line takes
_PROSE = re.compile(r"^\d+ devices or nodes of |^streamload\.|^from_pretrained")
_MOST_NBYTES = 2**22  # of a checkpoint that is loaded again

raised: list[errors.StreamloadError] = []


def record() -> None:
    """Keep the errors that are made from now on."""
    before = errors.StreamloadError.__post_init__

    def kept(error: errors.StreamloadError) -> None:
        before(error)
        if isinstance(error, (errors.PlanInfeasibleError, errors.StateDictMismatchError)):
            raised.append(error)

    errors.StreamloadError.__post_init__ = kept  # type: ignore[method-assign]


def lines_of(error: errors.StreamloadError) -> list[str]:
    if isinstance(error, errors.StateDictMismatchError):
        return [each.arguments for each in error.suggestions]
    lines = getattr(error, "would_fit", ())
    return [_FIGURES.sub("", line) for line in lines if not _PROSE.match(line)]


def useless() -> Iterator[str]:
    """Suggestions that do not help, of the errors since the last call."""
    errors_made, raised[:] = list(raised), []
    for error in errors_made:
        frame = _entrance(error)
        if frame is None:
            continue
        given, model = frame.f_locals["options"], frame.f_locals.get("model", ())
        path = frame.f_locals["path"]
        for line in lines_of(error):
            is_call = line.startswith("streamload.nn.")  # made before the load
            changed = {} if is_call else eval(f"dict({line})")
            if frame.f_code.co_name != "plan" and not _is_small(path):
                continue
            run, first = _ENTRANCES[frame.f_code.co_name], () if model == () else (model,)
            try:
                if is_call:
                    exec(f"import streamload.nn; {line}", {"model": model})
                report = run(*first, path, **{**given, **changed})
                if isinstance(report, streamload.LoadReport):
                    yield from (f"{line}: {why}" for why in _wrong(report, path, model))
            except TypeError:
                raise
            except Exception as again:  # another one: it went further
                if type(again) is type(error) and str(again) == str(error):
                    yield f"{line}: {again}"


def _wrong(report: streamload.LoadReport, path: Any, model: Any) -> Iterator[str]:
    """What is wrong with the values of a load that a suggestion made."""
    checkpoint = open_checkpoint(path)
    taken = {r.tensor for p in report.plan.placements for r in p.source if not p.src.is_packed}
    for group in checkpoint.groups.values():
        scales = [m.name for m in group.members.values() if m.dtype.kind == "float"]
        if group.values.name in taken and not taken.issuperset(scales):
            yield f"{group.values.name} without its scales"
    if not any(p.changes for p in report.plan.placements):
        yield from map(str, verify(report, checkpoint, None if model == () else model))


def _entrance(error: errors.StreamloadError) -> FrameType | None:
    """The call of the user that raised an error, if it can be made again."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        module = frame.f_globals.get("__name__", "")
        if module.startswith("streamload.") and frame.f_code.co_name in _ENTRANCES:
            return frame if "options" in frame.f_locals else None
        trace = trace.tb_next
    return None


def _is_small(path: Any) -> bool:
    if not isinstance(path, (str, Path)) or not Path(path).exists():
        return False
    root = Path(path)
    files = [root] if root.is_file() else list(root.glob("*"))
    return sum(file.stat().st_size for file in files) <= _MOST_NBYTES
