"""The in-tree build backend: whose PyTorch an isolated build uses."""

from __future__ import annotations

import importlib.util
import sys
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
