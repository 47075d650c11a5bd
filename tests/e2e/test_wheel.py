"""A wheel built here is all that a machine without a compiler needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).parents[2]


def test_every_system_has_its_wheel() -> None:
    """What the configuration builds, the workflow runs, and on machines of that kind."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    flow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    archs = {name: settings[name]["archs"] for name in ("linux", "macos", "windows")}
    assert archs == {"linux": ["x86_64", "aarch64"], "macos": ["arm64"], "windows": ["AMD64"]}
    for system, name in (("ubuntu", "linux"), ("macos", "macos"), ("windows", "windows")):
        for arch in archs[name]:
            lines = [line for line in flow.splitlines() if f"os: {system}" in line]
            assert any(f"archs: {arch} " in line for line in lines), (system, arch)
    smoke = settings["test-command"].rpartition("/")[2]
    assert (ROOT / "tests" / smoke).is_file()
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"cp{least.removeprefix('>=').replace('.', '')}-*" in settings["build"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("quire/", "quire-")) for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".gguf", ".a"))]
    assert len([name for name in names if name.endswith(".so")]) == 1
    assert wheel.stat().st_size < 5_000_000


@pytest.mark.slow
def test_it_runs_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    env = {**os.environ, "PATH": str(programs), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV"):
        env.pop(name, None)
    assert not any(shutil.which(name, path=env["PATH"]) for name in ("cc", "c++", "gcc", "g++"))

    def run(*words: str) -> str:
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(str(programs / "python"), "-m", "pip", "install", "--quiet", str(wheel))
    model = tmp_path / "tiny.gguf"
    tiny.write(model, tiny.Tiny())
    answer = run(str(programs / "quire"), "run", "hello", "-m", str(model), "-n", "5", "--raw")
    assert answer.endswith("\n")
    assert "smollm2" in run(str(programs / "quire"), "list")
    assert str(tmp_path) in run(str(programs / "python"), str(ROOT / "tests" / "wheel_smoke.py"))
