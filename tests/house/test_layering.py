"""The floors of the package: which room may import which, and what is done in one place only."""

from __future__ import annotations

import ast
import gc
import graphlib
import importlib
import inspect
import pkgutil
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "streamload"

#: Rooms by floor, lowest first. A room imports from the floors below its own.
FLOORS = (
    ("errors",),
    ("core",),
    ("files",),
    ("codecs",),
    ("formats",),
    ("checkpoint",),
    ("devices",),
    ("planning",),
    ("streaming",),
    ("loading",),
    ("conversion", "offloading", "verification"),
    ("transformers",),
    ("distributed",),
    ("bench",),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
#: What stands in the repository's root.
ROOT_NAMES = {
    *(".ci", ".github", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"),
    *("README.md", "SECURITY.md", "docs", "mkdocs.yml", "pyproject.toml", "scripts", "streamload"),
    "tests",
}
#: Modules at the top that import any room.
FRONTS = ("", "__main__", "diffusers", "nn", "vllm")
#: Rooms that may import the names of `streamload` itself.
OF_THE_ROOT = ("bench", "cli")
#: Packages with code in their ``__init__``.
WITH_CODE = ("", "cli", "distributed", "transformers")

#: Frameworks, and the names of files and folders (alone or before "_") that may import them.
FRAMEWORKS = {
    "tinygrad": ("tinygrad",),
    "torch": ("torch",),
    "mpi4py": ("mpi",),
    "ray": ("ray",),
    "transformers": (),
    "accelerate": (),
    "diffusers": (),
    "vllm": ("vllm",),
    "httpx2": ("remote", "connections"),
    "huggingface_hub": ("hub",),
    "httpcore2": ("connections",),
    "obstore": ("stores",),
    "boto3": ("stores",),
}
#: Rooms that may import every framework.
OF_FRAMEWORKS = ("bench", "transformers")
READ_ENVIRONMENT = (
    *("core.disk_cache", "core.system", "files.connections"),
    "files.stores",
    *("devices.names", "devices.probing"),
    *("distributed.launch", "distributed.ray", "distributed.store", "distributed.torch"),
)
START_THREADS = (
    *("streaming.loop", "conversion.writing", "bench.limits"),  # of a process each
    "streaming.device_casts",  # to send scales ahead
    "devices.bulk",  # to read a layer together, again and again
    "devices.cuda_copies",  # to lock pages while others are read
    *("distributed.store", "distributed.heartbeat", "distributed.gather"),
    "distributed.torch",  # to connect to a store of another kind, which nothing interrupts
    "distributed.replan",  # to ask a store that may wait without end, and to leave one
    "core.interrupt",  # for `offloading.prefetch`, which says so by its annotations, too
    "offloading.prefetch",  # to bring layers while the caller computes, and to wait for a device
    "files.connections",  # to connect, which nothing interrupts
    "files.hub",  # to download while others read
    "files.stores",  # for the event loop of a bucket's requests
    "verification.verify",  # checksums of replicas, after the load
)
STARTERS = {
    *("Thread", "Timer", "start_new_thread", "ThreadPool", "ThreadPoolExecutor"),
    *("ProcessPoolExecutor", "to_thread", "run_in_executor"),
}


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = {module for module, path in FILES.items() if path.name == "__init__.py"}


def _room(module: str) -> str:
    return module.partition(".")[0]


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(), FILES[module])


@cache
def _nodes(module: str) -> Sequence[ast.AST]:
    return tuple(ast.walk(_tree(module)))


def _late(module: str) -> set[int]:
    """Ids of nodes that run when a function is called, or that are for types alone."""
    late: set[int] = set()
    for node in _nodes(module):
        if id(node) in late:
            continue
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            late |= {id(each) for each in ast.walk(node)}
    return late


def _imports(module: str, *, at_import: bool = False) -> Iterator[str]:
    """Names of the modules that a file imports; inside functions, too, unless ``at_import``."""
    late = _late(module) if at_import else set()
    for node in _nodes(module):
        if id(node) in late:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("streamload.") in FILES
                yield inner if is_module else str(node.module)


def _inside(module: str, *, at_import: bool = False) -> set[str]:
    """Modules of this package that a file imports; "" for the package itself."""
    return {
        name.removeprefix("streamload").removeprefix(".")
        for name in _imports(module, at_import=at_import)
        if name.partition(".")[0] == "streamload"
    }


def _names(module: str) -> set[str]:
    """Every identifier that a file uses, as a name, an attribute or an import."""
    found: set[str] = set()
    for node in _nodes(module):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
    return found


def _documented(module: str) -> set[int]:
    """Ids of the constants that are docstrings."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    return {
        id(node.body[0].value)
        for node in _nodes(module)
        if isinstance(node, kinds) and node.body and isinstance(node.body[0], ast.Expr)
    }


@pytest.fixture(scope="module", autouse=True)
def uncollected() -> Iterator[None]:
    """No garbage collection while the trees grow: it takes twice as long as parsing does."""
    gc.disable()
    yield
    _tree.cache_clear()
    _nodes.cache_clear()
    gc.enable()


def test_every_file_is_in_a_room() -> None:
    odd = [module for module in FILES if _room(module) not in FLOOR and module not in FRONTS]
    assert not odd
    assert {_room(module) for module in FILES} - set(FRONTS) == set(FLOOR)


def test_a_room_imports_from_the_floors_below() -> None:
    rooms = {module: _room(module) for module in FILES if module not in FRONTS}
    wrong = [
        f"{module} imports {other}"
        for module, room in rooms.items()
        for other in _inside(module)
        if (other in FRONTS and room not in OF_THE_ROOT)
        or (other not in FRONTS and _room(other) != room and FLOOR[_room(other)] >= FLOOR[room])
    ]
    assert not wrong


def test_no_files_import_each_other() -> None:
    graph = {
        module: {other for other in _inside(module, at_import=True) if other != module}
        for module in FILES
        if module not in FRONTS
    }
    # the code of a package's __init__ imports its own files, which do not import the package
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_no_import_by_string_across_rooms() -> None:
    wrong = [
        f"{module} names {node.value}"
        for module in FILES
        if module not in FRONTS and _room(module) not in OF_THE_ROOT
        for documented in [_documented(module)]
        for node in _nodes(module)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documented
        and re.fullmatch(r"streamload(\.[a-z_0-9]+)+", node.value)
        and (other := node.value.removeprefix("streamload.")) in FILES
        and _room(other) != _room(module)
    ]
    assert not wrong


def test_a_framework_is_imported_in_its_own_files_only() -> None:
    foreign = [
        f"{module} imports {name}"
        for module in FILES
        if _room(module) not in OF_FRAMEWORKS
        for name in {name.partition(".")[0] for name in _imports(module)} & FRAMEWORKS.keys()
        for parts in [module.split(".")]
        if not any(
            p == home or p.startswith(f"{home}_") for p in parts for home in FRAMEWORKS[name]
        )
    ]
    assert not foreign


def test_threads_are_started_in_few_files_only() -> None:
    """Only loads, their checksums, conversions and benches start threads; locks may be anywhere."""
    started = {module: found for module in FILES if (found := _names(module) & STARTERS)}
    assert started.keys() <= set(START_THREADS), started


def test_the_environment_is_read_at_the_edge() -> None:
    reading = {"environ", "environb", "getenv", "getenvb"}
    read = {module: found for module in FILES if (found := _names(module) & reading)}
    assert read.keys() <= set(READ_ENVIRONMENT), read


def test_python_is_started_by_one_command() -> None:
    """`core.system.python_command` makes each child's command; a probe's key names the program."""
    using = {module for module in FILES if "executable" in _names(module)}
    assert using == {"core.system", "devices.probing"}


def test_the_lists_of_this_page_name_files() -> None:
    assert set(READ_ENVIRONMENT) | set(START_THREADS) <= set(FILES)
    assert all(_names(module) & STARTERS for module in START_THREADS)


def test_packages_hold_a_docstring_alone() -> None:
    assert not [p for p in PACKAGES - set(WITH_CODE) if len(_tree(p).body) != 1]


@pytest.mark.parametrize("package", WITH_CODE)
def test_no_module_hides_behind_a_function(package: str) -> None:
    name = ".".join(filter(None, ("streamload", package)))
    exporter = importlib.import_module(name)
    exported = {each for each in getattr(exporter, "__all__", ()) if each != "__version__"}
    modules = {each.name for each in pkgutil.iter_modules(exporter.__path__)}
    assert all(inspect.ismodule(getattr(exporter, each)) for each in exported & modules)


def test_nothing_else_stands_in_the_root() -> None:
    """Of the files that git tracks, or would add: a test or trial has not left one behind."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    names = {name for line in listed.stdout.splitlines() if (name := line.split("/")[0])}
    assert {name for name in names if (root / name).exists()} == ROOT_NAMES
