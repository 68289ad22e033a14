"""setuptools' build backend, with the calling environment's PyTorch.

An isolated build starts in an environment of its own, where a requirement on
torch means a download of gigabytes, of a version that may not be the one in
use. This backend looks for the torch of the environment that asked for the
build, and requires one only where there is none. And its source distributions
are reproducible, which setuptools' are not.
"""

from __future__ import annotations

import gzip
import os
import re
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools

OLDEST_TORCH = (2, 10)
# Of what a source distribution holds, where SOURCE_DATE_EPOCH names no other: zip knows none older.
DATE = 315619200  # 1980-01-02
REQUIREMENT = "torch>=" + ".".join(map(str, OLDEST_TORCH))


def _site_packages_of(prefix: str) -> Iterator[Path]:
    """Folders that hold an environment's packages for this Python version."""
    base = {"base": prefix, "platbase": prefix}
    for key in ("purelib", "platlib"):
        yield Path(
            sysconfig.get_path(key, scheme="venv", vars=base)
            if "venv" in sysconfig.get_scheme_names()
            else sysconfig.get_path(key, vars=base)
        )


def _prefix_of_parent() -> str | None:
    """The environment of the process that started this one (Linux only)."""
    try:
        parent = Path("/proc", str(os.getppid()))
        program = parent.joinpath("cmdline").read_bytes().split(b"\0")[0].decode()
        path = parent.joinpath("cwd").readlink() / program
    except OSError:
        return None
    return str(path.parent.parent) if path.parent.name == "bin" else None


def _candidates() -> Iterator[Path]:
    # pip runs the calling environment's interpreter, with its packages hidden.
    yield from (Path(sysconfig.get_path(key)) for key in ("purelib", "platlib"))
    # `python -m build` runs another interpreter: the caller's environment is the
    # active one, or that of the parent process.
    for prefix in (
        os.environ.get("VIRTUAL_ENV"),
        os.environ.get("CONDA_PREFIX"),
        _prefix_of_parent(),
    ):
        if prefix:
            yield from _site_packages_of(prefix)


def _version_of_torch_in(folder: Path) -> tuple[int, ...] | None:
    for metadata in folder.glob("torch-*.dist-info"):
        match = re.match(r"torch-(\d+)\.(\d+)", metadata.name)
        if match and (folder / "torch" / "__init__.py").exists():
            return tuple(map(int, match.groups()))
    return None


def _use_torch_of_caller() -> bool:
    """Makes the caller's torch importable; False where it has none new enough."""
    for folder in _candidates():
        version = _version_of_torch_in(folder)
        if version is not None and version >= OLDEST_TORCH:
            # Last: what the build environment has itself comes first.
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
            return True
    return False


def _requirements(found: list[str]) -> list[str]:
    return found if _use_torch_of_caller() else [*found, REQUIREMENT]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    # setuptools would run setup.py to ask it, which needs torch: ours names none.
    return _requirements([])


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _requirements([])


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _requirements([])


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    _use_torch_of_caller()
    return _setuptools.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    _use_torch_of_caller()
    return _setuptools.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _use_torch_of_caller()
    return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    _use_torch_of_caller()
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    _use_torch_of_caller()
    name = _setuptools.build_sdist(sdist_directory, config_settings)
    _pack_again(Path(sdist_directory, name), int(os.environ.get("SOURCE_DATE_EPOCH", DATE)))
    return name


def _pack_again(archive: Path, date: int) -> None:
    """Lets the same files give the same bytes, whoever packed them, when and in what order."""
    packed = archive.with_name(f"{archive.name}.new")
    with (
        tarfile.open(archive) as old,
        packed.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=date) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime = date
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    packed.replace(archive)
