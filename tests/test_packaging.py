"""The wheel holds what it must, and the pins fit what the package asks for."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kda_jit

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build", reason="needs the package build")
    pytest.importorskip("hatchling", reason="needs the package hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_every_source_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    def files(folder, *patterns):
        return {p.relative_to(folder.parent).as_posix() for e in patterns for p in folder.rglob(e)}

    kernels = files(ROOT / "kernels_src", "*.cu", "*.cuh")
    assert names == files(ROOT / "kda_jit", "*.py", "py.typed") | {f"kda_jit/{n}" for n in kernels}
    assert any(name.endswith(".cu") for name in names)


def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = archive.read(f"{info}/METADATA").decode()
    assert re.search(r"^Version: (.*)$", metadata, re.M).group(1) == kda_jit.__version__
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.M))
    assert extras >= {"cuda12", "cuda13", "triton", "cli", "dev", "demo", "notebooks"}
    assert "kda-jit = kda_jit.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()


def test_package_from_the_wheel_uses_the_kernels_in_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import kda_jit.jit.sources as s; print(s.__file__); print(s.root())"
    env = {k: v for k, v in os.environ.items() if not k.startswith("KDA_JIT_")}
    env["PYTHONPATH"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    module, root = run.stdout.split()
    assert module == str(tmp_path / "kda_jit" / "jit" / "sources.py")
    assert root == str(tmp_path / "kda_jit" / "kernels_src")


@pytest.mark.parametrize("value", ["on", "off"])
def test_an_engine_finds_the_plugin_of_the_wheel(wheel, tmp_path, value):
    """As vLLM looks for plugins: by entry point, and then it calls each."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
from importlib.metadata import entry_points
(point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "kda_jit"]
point.load()()
from kda_jit.integrations import vllm
print(vllm.__file__, vllm.is_registered())
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KDA_JIT_")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=env | {"PYTHONPATH": str(tmp_path), "KDA_JIT_VLLM": value},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    module = tmp_path / "kda_jit" / "integrations" / "vllm.py"
    assert run.stdout == f"{module} {value == 'on'}\n"


def test_pins_satisfy_every_requirement():
    """Each package that an extra asks for, save jupyterlab, has a pin, and the pin is allowed."""
    requirements = pytest.importorskip("packaging.requirements")
    utils = pytest.importorskip("packaging.utils")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {utils.canonicalize_name(name): version for name, version in pins.items()}
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for text in {text for group in groups for text in group}:
        wanted = requirements.Requirement(text)
        name = utils.canonicalize_name(wanted.name)
        if name in ("kda-jit", "jupyterlab"):
            continue
        assert name in pins, f"{name} has no pin in constraints.txt"
        assert wanted.specifier.contains(pins[name]), f"{text}, but pinned to {pins[name]}"
