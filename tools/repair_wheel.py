"""Makes a wheel fit for the index: platform tag, bill of materials; nothing vendored.

    python tools/repair_wheel.py WHEEL FOLDER

Runs auditwheel, delocate or delvewheel, each told to leave out the libraries that PyTorch or a
GPU's driver brings: a second copy of one would be another library with another state.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from wheel_sbom import add_sbom

# Of PyTorch, its OpenMP runtime, and the driver. Ours are linked against the first two or three.
LEFT_OUT = ("torch", "torch_cpu", "torch_cuda", "torch_python", "c10", "c10_cuda", "cuda", "gomp")


def repair(wheel: Path, folder: Path) -> None:
    """Writes the repaired wheel into ``folder``."""
    if sys.platform == "linux":
        excluded = [f"--exclude=lib{name}.so*" for name in LEFT_OUT]
        command = ["auditwheel", "repair", *excluded, "--wheel-dir", folder, wheel]
    elif sys.platform == "darwin":
        excluded = [f"--exclude=lib{name}.dylib" for name in (*LEFT_OUT, "omp")]
        command = ["delocate-wheel", *excluded, "--wheel-dir", folder, wheel]
    else:
        names = ";".join(f"{name}.dll" for name in LEFT_OUT)
        command = ["delvewheel", "repair", "--exclude", names, "--wheel-dir", folder, wheel]
    # The tools of this environment, active or not; they look for theirs on the path too.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which(str(command[0]), path=path) or command[0]
    subprocess.run([program, *command[1:]], check=True, env=os.environ | {"PATH": path})


def main(wheel: Path, folder: Path) -> None:
    """Repairs one wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        repair(wheel, Path(temporary))
        (repaired,) = Path(temporary).glob("*.whl")
        add_sbom(repaired, folder)
    print(f"repaired: {folder / repaired.name}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
