"""The rules of the house, read from the sources: what may import what, how long a file may be, what nothing may do."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import tighter_gp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / "tighter_gp").rglob("*.py"))
CLIENTS = [path for folder in ("benchmarks", "notebooks") for path in sorted((ROOT / folder).rglob("*.py"))]

# The core, which knows nothing of what one does with a model, and the few tools that it may use.
CORE = {"maths", "prior", "conditionals", "likelihoods", "carrier", "strategies", "mlls", "collapsed", "gplvm"}
CORE |= {"settings", "modes"}
# Parts of its rooms that predict, and so belong to the shell.
SHELL = {"gplvm/inference.py", "gplvm/report.py"}
RUNTIME = {"torch", "gpytorch", "linear_operator", "numpy", "tighter_gp", *sys.stdlib_module_names}
MOST_LINES, MOST_NAMES = 250, 36


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def room(path: Path) -> str:
    return path.relative_to(ROOT / "tighter_gp").with_suffix("").parts[0]


def in_core(path: Path) -> bool:
    return room(path) in CORE and path.relative_to(ROOT / "tighter_gp").as_posix() not in SHELL


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def nodes_of(paths, without_types: bool = False) -> Iterator[tuple[Path, ast.AST]]:
    """All nodes, perhaps without what is imported for annotations alone."""
    for path in paths:
        hidden: set[int] = set()
        for node in ast.walk(tree_of(path)):
            if without_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                hidden |= {id(inner) for inner in ast.walk(node)}
            if id(node) not in hidden:
                yield path, node


def imports(paths, **kwargs) -> Iterator[tuple[Path, ast.AST, str, str | None]]:
    """``(path, node, module, name)`` for each import, absolute; the name is None for ``import module``."""
    for path, node in nodes_of(paths, **kwargs):
        if isinstance(node, ast.Import):
            yield from ((path, node, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module_of(path).split(".")
            parents = parents[: len(parents) - node.level + (path.name == "__init__.py")] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((path, node, base, alias.name) for alias in node.names)


def lines_of_code(path: Path) -> int:
    """Without docstrings, comments and blanks."""
    prose: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, node.end_lineno + 1))
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in ignored and token.string:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - prose)


def test_the_core_never_imports_the_shell():
    found = []
    for path, node, base, name in imports(PACKAGE):
        if in_core(path) and base.split(".")[0] == "tighter_gp":
            target = base.split(".")[1] if "." in base else name
            if target not in CORE:
                found.append(f"{place(path, node)}: {target}")
    assert found == []


def test_the_core_keeps_no_hidden_state_and_needs_torch_and_gpytorch_alone():
    core = [path for path in PACKAGE if in_core(path)]
    banned = {"contextvars", "logging", "numpy"}
    found = [f"{place(p, n)}: {base}" for p, n, base, _ in imports(core, without_types=True) if base in banned]
    assert found == []


def test_pure_maths_needs_torch_alone():
    maths = [path for path in PACKAGE if room(path) == "maths"]
    allowed = {"torch", "tighter_gp", *sys.stdlib_module_names}
    assert [place(p, n) for p, n, base, _ in imports(maths) if base.split(".")[0] not in allowed] == []
    assert [
        place(p, n) for p, n, base, _ in imports(maths) if base.startswith("tighter_gp.") and ".maths" not in base
    ] == []


def test_importing_the_package_needs_its_declared_dependencies_alone():
    core = [path for path in PACKAGE if path.stem not in ("botorch", "estimators")]  # which say what they need
    top = ((path, node) for path in core for node in tree_of(path).body)
    names = [
        (place(path, node), alias.name.split(".")[0])
        for path, node in top
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [
        (place(path, node), node.module.split(".")[0])
        for path in core
        for node in tree_of(path).body
        if isinstance(node, ast.ImportFrom) and node.level == 0
    ]
    assert [where for where, name in names if name not in RUNTIME] == []


def test_no_file_is_long():
    assert {str(p.relative_to(ROOT)): n for p in PACKAGE if (n := lines_of_code(p)) > MOST_LINES} == {}


def test_the_users_program_and_its_modules_are_left_alone():
    """Devices and dtypes come from the inputs; nothing sniffs at what is loaded."""
    found = []
    for path, node in nodes_of(PACKAGE):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        is_cuda = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
        is_modules = isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules"
        is_default = name in ("set_default_dtype", "set_default_device", "set_default_tensor_type")
        if is_cuda or is_modules or is_default:
            found.append(f"{place(path, node)}: {ast.unparse(node)}")
    assert found == []


def test_public_names_exist_and_are_few():
    assert len(tighter_gp.__all__) <= MOST_NAMES
    packages = [module_of(path) for path in PACKAGE if path.name == "__init__.py"]
    missing = [
        f"{name}.{public}"
        for name in packages
        for public in importlib.import_module(name).__all__
        if not hasattr(importlib.import_module(name), public)
    ]
    assert missing == []


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_experiments_use_public_names_only():
    modules, found = {module_of(path) for path in PACKAGE}, []
    for path, node in nodes_of(CLIENTS):
        first, _, rest = dotted(node).partition(".")
        if isinstance(node, ast.Attribute) and first == "tighter_gp" and rest != "__version__":
            is_known = rest.split(".")[0] in tighter_gp.__all__ or f"tighter_gp.{rest.split('.')[0]}" in modules
            if not is_known or "._" in f".{rest}":
                found.append(f"{place(path, node)}: {rest}")
    for path, node, base, name in imports(CLIENTS):
        if base.split(".")[0] == "tighter_gp" and "._" in f".{base}.{name or ''}":
            found.append(f"{place(path, node)}: {base}.{name}")
    assert found == []


# What executes what it is given, hands it to a shell, or writes files where an archive says.
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"),
    *("marshal.loads", "shelve.open", "yaml.load", "joblib.load", "dill.load", "tempfile.mktemp"),
}


def executes(node: ast.Call) -> bool:
    keywords = {keyword.arg: getattr(keyword.value, "value", "unknown") for keyword in node.keywords}
    name = dotted(node.func)
    return (
        name in FORBIDDEN
        or name.endswith((".extractall", ".unpack_archive"))
        or keywords.get("shell", False) is not False
        or (name == "torch.load" and keywords.get("weights_only") is not True)
        or (name in ("np.load", "numpy.load") and bool(keywords.get("allow_pickle")))
    )


def test_no_source_executes_what_it_is_given():
    calls = ((path, node) for path, node in nodes_of([*PACKAGE, *CLIENTS]) if isinstance(node, ast.Call))
    assert [place(path, node) for path, node in calls if executes(node)] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("exec(code)", True),
        ("subprocess.run(command, shell=flag)", True),
        ("torch.load(path)", True),
        ("archive.extractall(folder)", True),
        ("torch.load(path, weights_only=True)", False),
        ("model.eval()", False),
        ("torch.compile(f)", False),
    ],
)
def test_that_rule_finds(line, expected):
    assert executes(ast.parse(line).body[0].value) == expected


def test_no_path_of_a_machine_is_written_down():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    here = Path(__file__).name
    texts = [
        name for name in listed if Path(name).suffix in (".py", ".md", ".toml", ".cff", ".yml") and here not in name
    ]
    bad = ("/work/", "/home/", "/root/", "/Users/")
    found = [name for name in texts if any(word in (ROOT / name).read_text(encoding="utf-8") for word in bad)]
    assert found == []


def test_oracles_share_no_code_with_the_package():
    used = {base.split(".")[0] for _, _, base, _ in imports([ROOT / "tests" / "tools" / "dense.py"])}
    assert used <= {"torch", *sys.stdlib_module_names}
