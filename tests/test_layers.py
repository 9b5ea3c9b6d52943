"""Who may import whom: right imports left, never back (AGENTS.md draws it)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "kda_jit"

# A module may import from its own layer's earlier modules, its own folder, and every layer above.
LAYERS = [
    ["_version", "errors", "settings", "extras"],
    ["jit.arch", "jit.sources", "jit.spec"],
    ["jit", "reference", "workspace", "varlen"],
    ["contract", "callfile"],
    ["backends", "triton_kernels"],
    ["resolver"],
    ["pack", "step", "snapshot", "capturing"],
    ["api", "recurrent", "layer", "mixed_batch", "core", "warmup", "ops", "arrays"],
    ["chunk"],
    [""],  # the package itself: the public names
    ["integrations"],  # stand-ins for other packages
    ["testing"],
    ["bench", "demo", "replay", "doctor"],
    ["testing.verify"],  # tries peers, too, through their adapters of the benchmarks
    ["compare", "picture"],
    ["lab"],
    ["cli", "__main__", "bench.__main__"],
]
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module):
    """Index of the layer whose entry is the longest prefix of the module's name."""
    best = max(
        (entry for layer in LAYERS for entry in layer if f"{module}.".startswith(f"{entry}.")),
        key=len,
        default=None,
    )
    assert best is not None or module == "", f"kda_jit.{module} has no layer: add it here"
    return next(i for i, layer in enumerate(LAYERS) if (best or "") in layer)


def imports_of(path):
    """Names under kda_jit that the file imports at run time, relative ones resolved."""
    inside = ["kda_jit", *name_of(path).split(".")] if name_of(path) else ["kda_jit"]
    package = inside if path.name == "__init__.py" else inside[:-1]
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    known = {name_of(p) for p in MODULES}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            full = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in full:
            if name.partition(".")[0] == "kda_jit":
                inner = name.partition(".")[2]
                while inner and inner not in known:  # a.b.function -> a.b
                    inner = inner.rpartition(".")[0]
                yield inner, node.lineno


@pytest.mark.parametrize("path", MODULES, ids=lambda p: name_of(p) or "kda_jit")
def test_imports_only_from_its_own_layer_and_those_before_it(path):
    own = layer_of(name_of(path))
    for imported, line in imports_of(path):
        assert layer_of(imported) <= own, (
            f"{path.relative_to(PACKAGE)}:{line} imports kda_jit.{imported}, of a later layer"
        )


def test_reference_knows_nothing_of_the_package():
    assert list(imports_of(PACKAGE / "reference.py")) == []


@pytest.mark.parametrize("name", ["arch", "sources", "spec", "compiler", "cache"])
def test_jit_down_to_the_cubin_does_without_torch(name):
    """On import, that is: a function may ask torch which GPU is there."""
    for node in ast.parse((PACKAGE / "jit" / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "torch" not in ast.unparse(node)
