"""The in-tree build backend: whose PyTorch an isolated build uses."""

from __future__ import annotations

import importlib.util
import os
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

BACKEND = Path(__file__).parents[1] / "build_backend" / "backend.py"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    specification = importlib.util.spec_from_file_location("backend_under_test", BACKEND)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


def environment_with_torch(folder: Path, version: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / f"torch-{version}.dist-info").mkdir()
    return folder


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "3.0.0"])
def test_torch_of_the_caller_is_used(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    caller = environment_with_torch(tmp_path, version)
    monkeypatch.setattr(backend, "_candidates", lambda: iter([tmp_path / "empty", caller]))
    assert backend.get_requires_for_build_wheel() == []
    assert sys.path[-1] == str(caller), "what the build environment has comes first"


@pytest.mark.parametrize("version", [None, "2.9.1"])
def test_torch_is_required_where_there_is_none_new_enough(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    if version is not None:
        environment_with_torch(tmp_path, version)
    before = list(sys.path)
    monkeypatch.setattr(backend, "_candidates", lambda: iter([tmp_path]))
    for ask in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        assert ask() == ["torch>=2.10"]
    assert sys.path == before


def test_metadata_without_the_package_does_not_count(backend: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    assert backend._version_of_torch_in(tmp_path) is None


def test_active_environment_is_a_candidate(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert any(folder.is_relative_to(tmp_path) for folder in backend._candidates())


@pytest.mark.parametrize("date", [315619200, 1700000000])
def test_source_distributions_of_the_same_files_are_the_same_bytes(
    backend: ModuleType, tmp_path: Path, date: int
) -> None:
    contents = {"PKG-INFO": "Name: p", "setup.py": "pass", "tools/run": "#!/bin/sh"}
    archives = []
    for build, order in enumerate([sorted(contents), sorted(contents, reverse=True)]):
        tree = tmp_path / str(build)
        (tree / "tools").mkdir(parents=True)
        for name in order:
            (tree / name).write_text(contents[name])
            (tree / name).chmod(0o640 + 0o100 * name.startswith("tools") + build)
            os.utime(tree / name, (1e9 + build, 1e9 + build / 3))
        archive = tmp_path / f"{build}.tar.gz"
        with tarfile.open(archive, "w:gz") as file:
            for name in order:
                file.add(tree / name, f"p-1/{name}")
        archives.append(archive)
    before = [archive.read_bytes() for archive in archives]
    assert before[0] != before[1]
    for archive in archives:
        backend._pack_again(archive, date)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as file:
        read = {m.name: (file.extractfile(m).read().decode(), m.mode, m.mtime) for m in file}
    assert read == {
        f"p-1/{name}": (text, 0o755 if name == "tools/run" else 0o644, date)
        for name, text in contents.items()
    }
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "0.tar.gz", "1.tar.gz"}
