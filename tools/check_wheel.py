"""Checks what a wheel holds, by its file alone.

    python tools/check_wheel.py WHEEL [--needs-cuda]

Every library of the platform and nothing of PyTorch, licence and bill of materials, the sizes.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from pathlib import Path

MIB = 1 << 20
# The index takes no larger file; and what people should not have to download.
LARGEST = 100 * MIB
LARGEST_WITHOUT_CUDA = 10 * MIB
FOREIGN = re.compile(r"(lib)?(torch|c10|gomp|iomp|omp|cudart|cuda)[^/]*\.(so|dylib|dll)(\.\d+)*")


def libraries_expected(wheel: str) -> set[str]:
    """Names of the libraries that every wheel of this platform holds."""
    levels = ["baseline"]
    if wheel.endswith(("x86_64.whl", "amd64.whl")):
        levels += ["avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16"]
        if "linux" in wheel:
            levels.append("amx")
    elif wheel.endswith("aarch64.whl") or ("macosx" in wheel and wheel.endswith("arm64.whl")):
        levels += ["neon_dotprod", "neon_bf16"]
    return {"_C", *(f"_cpu_{level}" for level in levels)}


def faults_of(wheel: Path, needs_cuda: bool) -> list[str]:
    """What is wrong, in words; an empty list where nothing is."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        largest = sorted(archive.infolist(), key=lambda info: -info.compress_size)[:6]
    libraries = {
        name.removeprefix("pkg/").split(".")[0]
        for name in names
        if re.fullmatch(r"pkg/_[^/]*\.(so|pyd)", name)
    }
    has_cuda = "_cuda" in libraries
    expected = libraries_expected(wheel.name) | ({"_cuda"} if has_cuda or needs_cuda else set())
    faults = []
    if libraries != expected:
        faults.append(f"it holds the libraries {sorted(libraries)}, not {sorted(expected)}")
    faults += [f"it vendors {name}" for name in names if FOREIGN.fullmatch(name.split("/")[-1])]
    faults += [
        f"{name} lies outside the package"
        for name in names
        if not re.match(r"(pkg|pkg_kernels-[^/]+\.dist-info)/", name)
    ]
    for part in ("licenses/LICENSE", "sboms/pkg-kernels.cdx.json"):
        if not any(name.endswith(f".dist-info/{part}") for name in names):
            faults.append(f"{part} is missing from its metadata")
    if "-linux_" in wheel.name:
        faults.append("it has no manylinux tag: auditwheel has not repaired it")
    size = wheel.stat().st_size
    limit = LARGEST if has_cuda else LARGEST_WITHOUT_CUDA
    if size > limit:
        faults.append(f"it is {size / MIB:.1f} MiB, more than {limit / MIB:.0f}")
    print(f"{wheel.name}: {size / MIB:.2f} MiB, {len(names)} files; the largest, compressed:")
    for info in largest:
        print(
            f"  {info.compress_size / MIB:6.2f} of {info.file_size / MIB:6.2f} MiB  {info.filename}"
        )
    return faults


def main() -> None:
    """Reports faults on stderr and by the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--needs-cuda", action="store_true", help="the CUDA library must be there")
    arguments = parser.parse_args()
    faults = faults_of(arguments.wheel, arguments.needs_cuda)
    for fault in faults:
        print(f"{arguments.wheel.name}: {fault}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
