"""The options of a load: said once, shown by every entrance, and refused where they are unknown."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Unpack, get_type_hints

import pytest
from needs import module

import streamload
from streamload.files.hub import HubFile
from streamload.files.remote import RemoteFile
from streamload.loading.options import OF_PASSES, OPTIONS, LoadOptions, Options, takes

LOADS = OPTIONS.keys() - OF_PASSES
CHANGES = {"transform", "adapters"}
ENTRANCES = {
    "load_state_dict": LOADS,
    "plan": LOADS - {"strict", "shapes", "progress"},
    "split": LOADS - {"strict", "shapes", "progress", "budget", "device", "residence", *CHANGES},
    "distributed.load_state_dict": LOADS - {"residence", *CHANGES},
    "distributed.plan": {
        *("budget", "device", "dtype", "quant", "rename", "mapping"),
        *("reserve", "context", "batch", "cache_dtype"),
    },
    "transformers.from_pretrained": LOADS - {"rename", "mapping"},
}


def entrance(name: str) -> Any:
    where, _, function = f"streamload.{name}".rpartition(".")
    return getattr(module(where), function)


@pytest.mark.parametrize("name", ENTRANCES)
def test_each_option_has_a_type_a_default_and_a_description(name: str) -> None:
    function = entrance(name)
    parameters = inspect.signature(function).parameters
    hints = get_type_hints(function)
    args = inspect.getdoc(function).partition("Args:\n")[2].partition("\n\n")[0]
    described = [line[4:].partition(":")[0] for line in args.splitlines() if line[4] != " "]
    assert described == list(parameters)
    assert {*parameters, "return"} == hints.keys()
    for option in ENTRANCES[name]:
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        # as with transformers' own, what does not match is warned of
        loose = (name, option) == ("transformers.from_pretrained", "strict")
        default = False if loose else OPTIONS[option].default
        assert parameters[option].default == default
    assert "options" not in parameters
    assert LOADS & parameters.keys() == ENTRANCES[name]


def test_dir_shows_public_names() -> None:
    assert dir(streamload) == sorted(dir(streamload))
    assert {"offload", "load_state_dict", "transformers", "__version__"} <= set(dir(streamload))
    assert set(dir(streamload)) == {*streamload.__all__, *streamload._LATER}


@pytest.mark.parametrize(
    ("name", "lacks"),
    [("transformers", "torch"), ("transformers", "transformers"), ("diffusers", "diffusers")],
)
def test_what_needs_an_extra_names_it(name: str, lacks: str) -> None:
    """With a line that installs its packages, wherever streamload itself came from."""
    program = f"import sys; sys.modules[{lacks!r}] = None; import streamload; streamload.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert f"streamload.{name} needs {lacks}, which is not installed; the extra {name}" in said
    assert re.search(r"pip install '.*transformers>=\d", said)


@pytest.mark.parametrize("name", ["cast", "strict", "threads", "tokens", "on_overrun"])
def test_a_plain_option_is_checked_by_its_type(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .*, not 0\.5$"):
        Options.parse({name: 0.5})


@pytest.mark.parametrize("name", ENTRANCES)
def test_an_unknown_option_is_refused_as_python_does(name: str) -> None:
    def plain(path: object, *, budget: object = None) -> None:
        """The plainest of functions."""

    with pytest.raises(TypeError) as expected:
        plain("", budgte=1)  # type: ignore[call-arg]
    function = entrance(name)
    said = str(expected.value).split("() ")[1].partition(". Did you mean")[0]
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) {said}$"):
        function(None, None, budgte=1)
    with pytest.raises(TypeError, match="missing"):
        function()


@takes(without=LOADS - {"reserve", "batch"}, cores="threads=4")
def narrow(
    path: str, *, verify: bool, fast: bool = True, **options: Unpack[LoadOptions]
) -> LoadOptions:
    """Say what it was given.

    Args:
        path: somewhere,
            on two lines.
        batch: as many as it likes.
        verify: whether it looks again.
        fast: whether it hurries.
        **options: see `LoadOptions`.

    Returns:
        The options.
    """
    return options


def test_a_narrower_entrance() -> None:
    assert narrow("x", verify=True, batch=2) == {"reserve": 0, "batch": 2}
    shown = inspect.signature(narrow)
    assert list(shown.parameters) == ["path", "verify", "reserve", "batch", "fast"]
    assert shown.return_annotation is LoadOptions
    assert get_type_hints(narrow)["batch"] is int
    assert pickle.loads(pickle.dumps(narrow)) is narrow
    with pytest.raises(TypeError, match=r"'dtype'$"):
        narrow("x", verify=True, dtype="float16")
    with pytest.raises(TypeError, match=r"'cores': write threads=4$"):
        narrow("x", verify=True, cores=2)  # type: ignore[call-arg]


def test_an_entrance_describes_an_option_in_its_own_words() -> None:
    text = (narrow.__doc__ or "").splitlines()
    assert text[:6] == [
        "Say what it was given.",
        "",
        "Args:",
        "    path: somewhere,",
        "        on two lines.",
        "    verify: whether it looks again.",
    ]
    assert text[6].startswith("    reserve: bytes, or a size, that stay free")
    assert text[8] == "    batch: as many as it likes."
    assert text[-4:] == ["    fast: whether it hurries.", "", "Returns:", "    The options."]


def public_functions() -> Iterator[tuple[str, Any]]:
    for found in pkgutil.walk_packages(streamload.__path__, "streamload."):
        if "._" in found.name:
            continue
        try:
            where = importlib.import_module(found.name)
        except ImportError:  # a framework that is not installed
            continue
        for name, each in vars(where).items():
            if name.startswith("_") or getattr(each, "__module__", None) != found.name:
                continue
            if inspect.isclass(each):
                inner = [(f"{name}.{n}", f) for n, f in vars(each).items() if n[0] != "_"]
                yield from ((f"{found.name}.{n}", f) for n, f in inner if inspect.isfunction(f))
            elif inspect.isfunction(each):
                yield f"{found.name}.{name}", each


def test_type_hints_of_everything_public() -> None:
    """`typing.get_type_hints` finds each name that an annotation uses.

    A local file imports no code of servers: annotations name classes that are there once it is.
    """
    of_servers = {"HubFile": HubFile, "RemoteFile": RemoteFile}
    functions = dict(public_functions())
    assert len(functions) > 300
    exported = {f"streamload.{name}": getattr(streamload, name) for name in streamload.__all__}
    problems = []
    for name, function in {**functions, **exported}.items():
        try:
            if callable(function):
                get_type_hints(function, localns=of_servers)
        except Exception as error:
            problems.append(f"{name}: {error}")
    assert not problems
