"""What a wheel would hold, and what the project says of itself."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = {"callbacks": "lit_diffrl.callbacks", "configs": "lit_diffrl.configs"}


def test_the_packages_are_the_folders():
    found = set()
    for folder in ("lit_diffrl", *MAPPED):
        for init in (ROOT / folder).rglob("__init__.py"):
            path = init.parent.relative_to(ROOT).as_posix()
            root, _, rest = path.partition("/")
            found.add(".".join([MAPPED.get(root, root), *rest.split("/")]) if rest else MAPPED.get(root, root))
    setuptools = PROJECT["tool"]["setuptools"]
    assert set(setuptools["packages"]) == found
    assert setuptools["package-dir"] == {package: folder for folder, package in MAPPED.items()}


@pytest.mark.slow
def test_a_wheel_holds_code_recipes_and_the_embedded_model(tmp_path):
    # From a copy: the build leaves folders behind, and takes over what an earlier one left.
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("the source is no git checkout")
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "src" / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", str(tmp_path / "src"), "--no-deps", "-q", "-w", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("lit_diffrl", *MAPPED):
        target = MAPPED.get(folder, folder).replace(".", "/")
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"{target}/{path.relative_to(ROOT / folder).as_posix()}" in held
    assert not [name for name in held if not name.startswith(("lit_diffrl/", "lit_diffrl-"))]
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_the_changelog_has_the_version():
    assert re.search(rf"^## \[{re.escape(PROJECT['project']['version'])}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_readme_names_every_recipe_and_its_commands_exist():
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^make (\w+)", readme, re.M) == ["quickstart", "test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert {"quickstart", "test", "lint"} <= set(targets)
    for name in re.findall(r"configs/[\w.]+\.yaml", readme):
        assert (ROOT / name).is_file(), f"README.md names {name}"
