"""The software bill of materials in a wheel: CycloneDX, in .dist-info/sboms (PEP 770).

Lists what is compiled in, which no metadata tells: headers and static libraries. What is merely
required (torch) is in the wheel's metadata, where installers and scanners read it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


def _component(name: str, version: str, license: str, how: str, source: str) -> Component:
    kind, _, path = source.partition(":")
    namespace, _, last = path.rpartition("/")
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=name,
        licenses=[LicenseExpression(license)],
        purl=PackageURL(type=kind, namespace=namespace or None, name=last, version=version),
        properties=[Property(name="pkg:linkage", value=how)],
    )


def _compiled_in(info: dict[str, str]) -> list[Component]:
    """What the libraries hold of others' code, from what the build says of itself."""
    parts = [
        _component("torch", info["torch"], "BSD-3-Clause", "headers", "pypi:torch"),
        _component("pybind11", info["pybind11"], "BSD-3-Clause", "headers", "pypi:pybind11"),
    ]
    if info["cuda_toolkit"]:
        name = "nvidia-cuda-runtime"
        toolkit = info["cuda_toolkit"]
        licence = "LicenseRef-NVIDIA-CUDA-EULA"
        parts.append(_component(name, toolkit, licence, "static library", f"pypi:{name}"))
    return parts


def _headers_of_build() -> dict[str, str]:
    """The versions of the headers that this environment builds with."""
    import torch

    header = Path(torch.__file__).parent / "include" / "pybind11" / "detail" / "common.h"
    text = header.read_text("utf-8")
    numbers = [
        re.search(rf"PYBIND11_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "MICRO")
    ]
    if not all(numbers):
        sys.exit(f"{header} does not say which pybind11 it is of")
    version = ".".join(match[1] for match in numbers if match)
    return {"torch": torch.__version__, "pybind11": version}


def _cuda_toolkit() -> str:
    """The release of the CUDA toolkit that this environment builds with."""
    home = os.environ.get("CUDA_HOME")
    nvcc = Path(home, "bin", "nvcc") if home else Path("nvcc")
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split("release ")[1].split(",")[0]


def bill_of_materials(wheel: Path) -> str:
    """The bill as JSON: the same text for the same wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        fields = HeaderParser().parsestr(archive.read(metadata).decode())
        has_cuda = any(name.startswith("pkg/_cuda") for name in archive.namelist())
    info = _headers_of_build() | {"cuda_toolkit": _cuda_toolkit() if has_cuda else ""}
    root = Component(
        name=fields["Name"],
        version=fields["Version"],
        type=ComponentType.LIBRARY,
        bom_ref=fields["Name"],
        licenses=[LicenseExpression(fields["License-Expression"])],
        purl=PackageURL(type="pypi", name=fields["Name"], version=fields["Version"]),
    )
    bom = Bom(
        components=_compiled_in(info), serial_number=uuid.uuid5(uuid.NAMESPACE_URL, wheel.name)
    )
    bom.metadata.component = root
    bom.dependencies.add(
        Dependency(root.bom_ref, [Dependency(part.bom_ref) for part in bom.components])
    )
    text = json.loads(JsonV1Dot6(bom).output_as_string())
    # A time would make each build another one.
    text["metadata"].pop("timestamp", None)
    return json.dumps(text, indent=2, sort_keys=True) + "\n"


def add_sbom(wheel: Path, folder: Path) -> None:
    """Writes the wheel with its bill of materials into ``folder``."""
    text = bill_of_materials(wheel)
    with tempfile.TemporaryDirectory() as temporary:
        run = [sys.executable, "-m", "wheel"]
        subprocess.run([*run, "unpack", "--dest", temporary, wheel], check=True)
        (tree,) = Path(temporary).iterdir()
        (info,) = tree.glob("*.dist-info")
        (info / "sboms").mkdir(exist_ok=True)
        (info / "sboms" / "pkg-kernels.cdx.json").write_text(text, "utf-8")
        subprocess.run([*run, "pack", "--dest-dir", folder, tree], check=True)
