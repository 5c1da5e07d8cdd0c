"""Helpers that `test_transformers_saving` shares with other tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs

torch = needs.module("torch")
transformers = needs.module("transformers")


def said_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("quantization_config")
