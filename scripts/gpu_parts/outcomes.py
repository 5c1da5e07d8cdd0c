"""A plugin of pytest: a line of JSON for what each test begins and how it ends."""

from __future__ import annotations

import json
import os
from typing import Any

_MOST_SAID = 1500  # characters of a failure
_OUT = "STREAMLOAD_GPU_OUTCOMES"  # the file


def _say(**facts: Any) -> None:
    with open(os.environ[_OUT], "a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def _reason(report: Any) -> str:
    # (file, line, "Skipped: reason")
    found = report.longrepr
    text = found[2] if isinstance(found, tuple) else str(found)
    return str(text).removeprefix("Skipped: ")


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    """Say that a test begins: the last of these is the one that crashes."""
    _say(test=nodeid, outcome="begun")


def pytest_collectreport(report: Any) -> None:
    """Say that a file could not be imported, or is skipped as a whole."""
    if report.skipped:
        _say(test=report.nodeid, outcome="skipped", why=_reason(report))
    elif report.failed:
        _say(test=report.nodeid, outcome="failed", why=str(report.longrepr)[-_MOST_SAID:])


def pytest_runtest_logreport(report: Any) -> None:
    """Say how a test ended, or that its setup or teardown failed."""
    if report.skipped:
        outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
        _say(test=report.nodeid, outcome=outcome, why=_reason(report))
    elif report.failed:
        why = str(report.longrepr)[-_MOST_SAID:]
        _say(test=report.nodeid, outcome="failed", why=why, phase=report.when)
    elif report.when == "call":
        _say(test=report.nodeid, outcome="passed", seconds=round(report.duration, 2))
