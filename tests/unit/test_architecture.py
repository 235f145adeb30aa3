"""Who may import whom, and what a module may be. Imports are read from the source, those inside functions too."""

from __future__ import annotations

import ast
import functools
import importlib.util
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
ROOTS = {"asyncckpt": "asyncckpt", "worker": "asyncckpt_worker", "examples": "asyncckpt.examples"}

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
EXECUTABLE_FORMATS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

DISTRIBUTED = {
    "asyncckpt.distributed.process_group",  # for saves and loads
    "asyncckpt.distributed.user_group",  # the group that a user of `dcp.load` names
    "asyncckpt.dcp.broadcast_reader",  # which rank of it reads
}
"""The modules that may call torch.distributed itself."""

MAX_FILES = 16
"""Of a package."""

EXTENDS_DCP = {"dcp", "integrations"}
"""Packages that may import torch.distributed.checkpoint, whose classes they implement."""

PICKLES = "asyncckpt.state_dict.pickling"
"""The one module that may unpickle, for users who say allow_pickle=True."""

MAY_USE_PICKLES = {
    *("asyncckpt.dcp.saved_metadata", "asyncckpt.loading.saved_state"),
    *("asyncckpt.state_dict.leaf_codecs", "asyncckpt.staging.stager"),
}
"""Modules that may import it, since they know whether the user has said so."""

DESCRIBES_DCP = "asyncckpt.interop.write_torch"
"""Writes the `.metadata` of a DCP directory as stock does: by torch's classes and `pickle.dumps`. Reads none."""

FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
"""Functions of torch that make tensors on the default device, which belongs to the user."""

HAS_A_PROCESS_OF_ITS_OWN = {"asyncckpt.interop.diff"}
"""Runs as a command, where nobody has set a default device."""

WORKER_MAY_IMPORT = {"", "errors", "dtypes", "basics", "protocol", "format", "memory", "storage"}
"""Packages of asyncckpt; "" is asyncckpt itself, for its version."""

FOR_THE_WORKER = {"asyncckpt.maintenance.event_log", "asyncckpt.maintenance.mirroring"}
"""Modules of `maintenance` that the worker may import: both sides of a run write to events.jsonl, and the worker copies
to mirrors, for which retention waits.
"""

MAY_IMPORT = {
    "errors": set(),
    "dtypes": set(),
    "basics": {"errors", "dtypes"},
    "format": {"errors", "dtypes", "basics"},
    "memory": {"errors", "dtypes", "basics"},
    "protocol": {"errors", "dtypes", "basics"},
    "storage": {"errors", "dtypes", "basics", "format", "memory", "protocol"},
    "maintenance": {"basics", "errors", "format", "storage"},
    "interop.sources": {"errors", "dtypes", "basics", "format", "storage", "sharding"},
    "per_rank": {"errors"},
    "torch_tensors": {"errors", "dtypes"},
    "sharding": {"errors", "dtypes", "basics", "format", "torch_tensors"},
    "state_dict": {"errors", "format", "per_rank", "sharding", "torch_tensors"},
    "planning": {"errors", "dtypes", "basics", "format", "protocol", "sharding", "state_dict", "torch_tensors"},
    "client": {
        *("basics", "commit_hooks", "components", "config", "errors", "save_handle"),
        *("format", "memory", "protocol", "planning", "distributed"),
    },
    "staging": {
        *("", "basics", "components", "config", "dtypes", "errors", "torch_tensors"),
        *("format", "memory", "protocol", "sharding", "state_dict", "planning", "distributed", "client"),
    },
}
"""Packages that may import only these packages besides themselves; one that is not named here is not restricted."""

TORCH_FREE = {
    *("", "errors", "dtypes", "config", "save_handle", "client", "per_rank", "basics", "protocol", "format", "memory"),
    *("storage", "maintenance", "interop.sources", "recall", "cli", "doctor", "reporting"),
}
"""They and the whole worker never import torch, nor does what they import. Commands of `cli` may, inside functions."""

PURE = {
    *("asyncckpt.sharding.mesh_layout", "asyncckpt.sharding.shard_claims", "asyncckpt.planning.load_balancing"),
    *("asyncckpt.planning.sample_schedule", "asyncckpt.planning.contributions", "asyncckpt.planning.shard_ownership"),
    *("asyncckpt.planning.write_agreement", "asyncckpt.planning.save_plan"),
}
"""Torch-free modules of packages that use torch: what all ranks compute alike from the same input."""

NEEDS_AN_EXTRA = {"asyncckpt_worker.service.prometheus": "prometheus_client"}
"""Modules that what is installed without extras cannot import; all others have to."""


class Import(NamedTuple):
    """One import statement: `name` as full as it can be told; `local`: inside a function; `typing`: never executed."""

    importer: str
    name: str
    line: int
    local: bool
    typing: bool


def _module_name(path: pathlib.Path) -> str:
    top, *rest = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join([ROOTS[top], *rest]).removesuffix(".__init__")


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Return every module of the packages."""
    return {_module_name(p): p for root in ROOTS for p in sorted((REPOSITORY / root).rglob("*.py"))}


@functools.cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    """Return the syntax tree of a module, and everything in it."""
    return tuple(ast.walk(ast.parse(modules()[name].read_text())))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        getattr(n, "id", getattr(n, "attr", "")) == "TYPE_CHECKING" for n in ast.walk(node.test)
    )


def _imports_below(importer: str, node: ast.AST, local: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = local or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(importer, alias.name, child.lineno, inside, typing)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{importer}:{child.lineno}: relative import"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                name = whole if whole in modules() else str(child.module)
                yield Import(importer, name, child.lineno, inside, typing)
        else:
            yield from _imports_below(importer, child, inside, typing or _is_type_checking(child))


@functools.cache
def imports() -> tuple[Import, ...]:
    """Return every import statement of the packages."""
    return tuple(i for name in modules() for i in _imports_below(name, nodes(name)[0], False, False))


def package_of(module: str) -> str:
    """Return the part of asyncckpt that a module belongs to; "" for the package itself."""
    top, _, rest = module.partition(".")[2].partition(".")
    return "interop.sources" if top == "interop" and rest.partition(".")[0] == "sources" else top


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "asyncckpt"


def _listed(found: list[Import], what_to_do: str) -> str:
    return "\n".join([*(f"{i.importer}:{i.line} imports {i.name}" for i in found), what_to_do])


def test_the_packages_are_there() -> None:
    assert {"asyncckpt", "asyncckpt_worker", "asyncckpt.protocol.messages"} <= set(modules())


def test_asyncckpt_never_imports_the_worker() -> None:
    wrong = [i for i in imports() if _is_ours(i.importer) and i.name.partition(".")[0] == "asyncckpt_worker"]
    text = "the worker imports asyncckpt, not the other way: move what both need to one of"
    assert not wrong, _listed(wrong, f"{text} {sorted(WORKER_MAY_IMPORT - {''})}")


def test_nothing_imports_the_folder_worker() -> None:
    wrong = [i for i in imports() if i.name.partition(".")[0] in ("worker", "examples", "tests", "benchmarks")]
    assert not wrong, _listed(wrong, f"import by the installed name: {ROOTS}; tests and benchmarks are not installed")


def test_worker_imports_only_what_it_may() -> None:
    wrong = [
        i
        for i in imports()
        if i.importer.startswith("asyncckpt_worker")
        and _is_ours(i.name)
        and package_of(i.name) not in WORKER_MAY_IMPORT
        and i.name not in FOR_THE_WORKER
    ]
    text = f"the worker may import {sorted(WORKER_MAY_IMPORT)} and {sorted(FOR_THE_WORKER)}: move what it needs there"
    assert not wrong, _listed(wrong, text)


@pytest.mark.parametrize("importer", MAY_IMPORT)
def test_package_imports_only_what_it_may(importer: str) -> None:
    wrong = [
        i
        for i in imports()
        if _is_ours(i.importer)
        and package_of(i.importer) == importer
        and _is_ours(i.name)
        and package_of(i.name) not in MAY_IMPORT[importer] | {importer}
    ]
    allowed = f"{importer!r} may import {sorted(MAY_IMPORT[importer])}, as docs/architecture.md says"
    assert not wrong, _listed(wrong, f"{allowed}: move the code, or hand over the value as an argument")


def _is_torch_free(module: str) -> bool:
    return not _is_ours(module) or package_of(module) in TORCH_FREE or module in PURE


def test_torch_is_not_imported_where_it_is_not_needed() -> None:
    wrong = [
        i
        for i in imports()
        if i.name.partition(".")[0] in ("torch", "numpy")
        and not i.typing
        and _is_torch_free(i.importer)
        and not (package_of(i.importer) == "cli" and i.local)
    ]
    text = "these modules start without torch: import it `if TYPE_CHECKING`, in a command of cli inside the function, "
    assert not wrong, _listed(wrong, text + "or move the code to a package that is not in TORCH_FREE")


def _cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the cycles of a directed graph, one for each node at which a search closes one."""
    found, done = [], set()

    def visit(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            for after in sorted(edges.get(node, ())):
                visit(after, [*path, node])
            done.add(node)

    for node in sorted(edges):
        visit(node, [])
    return found


def test_no_module_imports_itself_through_others() -> None:
    # The package itself is a facade: its names are looked up on first use, and everybody may ask for its version.
    edges: dict[str, set[str]] = {}
    for i in imports():
        if not i.typing and i.name in modules() and i.name != i.importer and "asyncckpt" not in (i.name, i.importer):
            edges.setdefault(i.importer, set()).add(i.name)
    cycles = sorted((" -> ".join(cycle) for cycle in _cycles(edges)), key=len)
    assert not cycles, "move what both need to a module below them"


def test_cycles_are_found() -> None:
    assert _cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]


def test_imports_inside_functions_are_seen() -> None:
    tree = ast.parse("def f():\n    if x:\n        from asyncckpt.format import names")
    assert [(i.name, i.local) for i in _imports_below("m", tree, False, False)] == [("asyncckpt.format.names", True)]


def test_nothing_executable_is_imported_or_evaluated() -> None:
    found = [i for i in imports() if i.name.partition(".")[0] in EXECUTABLE_FORMATS]
    assert {(i.importer, i.name) for i in found} == {(PICKLES, "pickle"), (DESCRIBES_DCP, "pickle")}, _listed(
        found, f"nothing executable is read from a disk or a wire; only {PICKLES} unpickles"
    )
    used = [n for n in nodes(DESCRIBES_DCP) if isinstance(n, ast.Attribute)]
    assert {n.attr for n in used if getattr(n.value, "id", "") == "pickle"} == {"dumps"}
    for name in modules():
        for node in nodes(name):
            called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            assert called not in ("eval", "exec", "__import__"), f"{name}:{node.lineno} calls {called}"


def test_only_who_is_told_by_the_user_reaches_the_pickles() -> None:
    users = {i.importer for i in imports() if i.name == PICKLES}
    assert users == MAY_USE_PICKLES, f"only they may import {PICKLES}: pass allow_pickle to one of them"


def _reaches(code: Iterable[ast.AST], package: str) -> bool:
    """Whether `package` is named in code by a chain of attributes, such as `torch.distributed.barrier()`."""
    return any(isinstance(n, ast.Attribute) and ast.unparse(n) == package for n in code)


def test_torch_distributed_is_asked_by_few_modules() -> None:
    whole = [i for i in imports() if (i.name + ".").startswith("torch.distributed.")]
    whole = [i for i in whole if i.importer.partition(".")[0] == "asyncckpt" and package_of(i.importer) != "examples"]
    of_dcp = [i for i in whole if (i.name + ".").startswith("torch.distributed.checkpoint.")]
    assert {i.importer for i in whole if i not in of_dcp} == DISTRIBUTED, (
        "only these modules may call torch.distributed: use what asyncckpt/distributed/process_group.py offers"
    )
    wrong = [
        i for i in of_dcp if package_of(i.importer) not in EXTENDS_DCP and not (i.importer == DESCRIBES_DCP and i.local)
    ]
    assert not wrong, _listed(wrong, f"only {sorted(EXTENDS_DCP)} may import torch.distributed.checkpoint")
    reaching = [
        name for name in modules() if package_of(name) != "examples" and _reaches(nodes(name), "torch.distributed")
    ]
    assert not reaching, "use what asyncckpt/distributed/process_group.py offers"
    assert _reaches(ast.walk(ast.parse("torch.distributed.barrier()")), "torch.distributed")


def test_modules_say_what_they_are() -> None:
    misnamed = [name for name in modules() if FORBIDDEN_NAMES & {part.lstrip("_") for part in name.split(".")}]
    assert not misnamed, f"name a module by its subject, not {sorted(FORBIDDEN_NAMES)}"
    silent = [name for name, path in modules().items() if path.read_text().strip() and not _docstring(nodes(name)[0])]
    assert not silent, "they have no docstring"


def _docstring(module: ast.AST) -> str | None:
    assert isinstance(module, ast.Module)
    return ast.get_docstring(module)


def test_whether_a_future_has_ended_is_asked_and_not_told_by_the_class_of_an_error() -> None:
    """A future's own error may be a TimeoutError, and that of Python 3.10's futures is another class."""
    bare = {"TimeoutError", "asyncio.TimeoutError", "concurrent.futures.TimeoutError", "futures.TimeoutError"}
    found = [
        f"{name}:{node.lineno}"
        for name in modules()
        for node in nodes(name)
        if isinstance(node, (ast.ExceptHandler, ast.Call))
        for one in ast.walk(node.type or ast.Pass() if isinstance(node, ast.ExceptHandler) else node)
        if (isinstance(node, ast.ExceptHandler) or ast.unparse(node.func) in ("isinstance", "contextlib.suppress"))
        and isinstance(one, (ast.Name, ast.Attribute))
        and ast.unparse(one) in bare
    ]
    assert not found, "call `concurrent.futures.wait`, then `done()`, as asyncckpt/client/session.py does"


def test_what_the_c_library_takes_is_declared_in_one_module() -> None:
    declared = [
        name
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Attribute) and node.attr == "argtypes"
    ]
    allowed = {"asyncckpt.basics.libc", "asyncckpt.memory.mapping"}  # the latter's function keeps the GIL
    assert set(declared) == allowed, "declare a function of the C library in asyncckpt/basics/libc.py"


def test_no_package_has_more_files_than_can_be_looked_through() -> None:
    packages = {file.parent for root in ROOTS for file in (REPOSITORY / root).rglob("__init__.py")}
    sizes = {str(package.relative_to(REPOSITORY)): len(list(package.glob("*.py"))) for package in packages}
    full = {package: size for package, size in sizes.items() if size > MAX_FILES}
    assert full == {}, (
        f"at most {MAX_FILES} files: put the code into a module of its subject, or several files of one subject into a "
        "package of their own, which pyproject.toml and docs/architecture.md list"
    )


def test_listed_packages_are_the_ones_in_the_tree() -> None:
    toml = pytest.importorskip("tomllib")
    listed = toml.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({n for n, p in modules().items() if p.name == "__init__.py"}), (
        "`packages` below [tool.setuptools] in pyproject.toml, without which a package is not installed"
    )


def test_quick_modules_load_without_torch_and_numpy() -> None:
    missing = {name for name, extra in NEEDS_AN_EXTRA.items() if importlib.util.find_spec(extra) is None}
    free = sorted(n for n in modules() if n.rpartition(".")[2] != "__main__" and _is_torch_free(n) and n not in missing)
    code = (
        f"import importlib, sys\nfor name in {free!r}:\n    importlib.import_module(name)\n"
        "    loaded = sorted({'torch', 'numpy'} & set(sys.modules))\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)


def test_import_asyncckpt_does_not_import_torch() -> None:
    code = "import asyncckpt, sys; assert not {'torch', 'numpy', 'zmq'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)


def test_every_tensor_that_is_made_is_made_on_a_named_device() -> None:
    wrong = [
        f"{name}:{node.lineno} torch.{node.func.attr}"
        for name in modules()
        if name not in HAS_A_PROCESS_OF_ITS_OWN and not name.startswith("asyncckpt.examples")
        for node in nodes(name)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and getattr(node.func.value, "id", "") == "torch"
        and node.func.attr in FACTORIES
        and "device" not in [keyword.arg for keyword in node.keywords]
    ]
    assert not wrong, "\n".join([*wrong, "pass device=: the default device belongs to the user"])


def test_tests_that_run_without_the_extras_import_none_of_them_unasked() -> None:
    """`make test-nonumpy` runs these in an environment without them; there, collecting such a test fails."""
    folder, makefile = REPOSITORY / "tests", (REPOSITORY / "Makefile").read_text()
    chosen = re.search(r'grep -rlE --include="test_\*\.py" \'(.*)\' tests/unit', makefile)
    assert chosen is not None
    ours = {path.stem for path in folder.rglob("*.py")} | {"tests", "asyncckpt", "asyncckpt_worker"}
    installed = {*sys.stdlib_module_names, *ours, "torch", "psutil", "zmq", "msgpack", "xxhash", "pytest"}
    wrong = []
    for path in sorted((folder / "unit").rglob("test_*.py")):
        text = path.read_text()
        if re.search(chosen[1].replace("\\b", r"\b"), text) is None:
            continue
        asked: set[str] = set()
        for node in ast.parse(text).body:
            calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
            skips = [
                one.args[0] for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "importorskip"
            ]
            asked.update(str(one.value).partition(".")[0] for one in skips if isinstance(one, ast.Constant))
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            used = {name.partition(".")[0] for name in names} - installed - asked
            wrong += [f"{path.relative_to(REPOSITORY)}:{node.lineno} {name}" for name in sorted(used)]
    assert not wrong, "\n".join([*wrong, 'call pytest.importorskip("...") before the import'])
