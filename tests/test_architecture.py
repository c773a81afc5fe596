"""Who may import whom, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a layer may import of this package, besides itself.
LAYERS = {
    "sampling": set(),
    "policies": {"sampling"},
    "rollouts": {"sampling"},
    "algorithms": {"sampling", "policies", "rollouts"},
    "callbacks": {"sampling", "rollouts", "algorithms"},
}
FAMILIES = {"SD3Policy", "FluxPolicy", "QwenImagePolicy", "WanPolicy"}


def sources(layer: str) -> list[Path]:
    folder = ROOT / ("callbacks" if layer == "callbacks" else f"lit_diffrl/{layer}")
    return sorted(folder.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """The modules and names that a file imports, at any depth, as dotted paths."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_is_below_it(layer):
    assert sources(layer)
    for path in sources(layer):
        used = {name.split(".")[1] for name in imports(path) if name.startswith("lit_diffrl.")}
        assert used <= LAYERS[layer] | {layer}, f"{path.relative_to(ROOT)} imports {used - LAYERS[layer] - {layer}}"


def test_sampling_needs_torch_only():
    for path in sources("sampling"):
        roots = {name.split(".")[0] for name in imports(path)} - {"lit_diffrl", "torch", "__future__"}
        assert roots <= {"collections", "dataclasses", "math", "typing", "enum", "abc", "functools"}, path


@pytest.mark.parametrize("layer", ["sampling", "rollouts", "algorithms", "callbacks"])
def test_only_policies_know_a_model_family(layer):
    for path in sources(layer):
        names = {name.rpartition(".")[2] for name in imports(path)} | {name.split(".")[0] for name in imports(path)}
        assert not names & (FAMILIES | {"diffusers", "peft"}), path


def test_the_package_imports_nothing_heavy_by_itself():
    for path in (ROOT / "lit_diffrl/__init__.py", ROOT / "lit_diffrl/__main__.py", ROOT / "lit_diffrl/cli/__init__.py"):
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        roots = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0] for n in top}
        assert not roots & {"torch", "lightning", "diffusers", "jsonargparse"}, path


def test_files_stay_small():
    for path in [*(ROOT / "lit_diffrl").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]:
        assert len(path.read_text().splitlines()) < 300, path
