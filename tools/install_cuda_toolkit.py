"""Installs CUDA's compiler from NVIDIA's wheels into a folder, to be named by CUDA_HOME.

    python tools/install_cuda_toolkit.py FOLDER

For build images without a toolkit: a hundred megabytes instead of the gigabytes of a CUDA image.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

# Only what compiling and linking statically needs; all of one release.
RELEASE = "13.0.*"
PARTS = ("nvcc", "crt", "runtime", "cccl")


def main(folder: Path) -> None:
    """Installs the toolkit and gives it the folders that build tools expect."""
    wheels = [f"nvidia-cuda-{part}=={RELEASE}" for part in PARTS] + [f"nvidia-nvvm=={RELEASE}"]
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", temporary]
        subprocess.run([*command, *wheels], check=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        (toolkit,) = Path(temporary, "nvidia").glob("cu*")
        subprocess.run(["cp", "-r", toolkit, folder], check=True)
    for program in (*folder.glob("bin/*"), *folder.glob("nvvm/bin/*")):
        program.chmod(0o755)
    (folder / "lib64").symlink_to("lib")
    subprocess.run([folder / "bin" / "nvcc", "--version"], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).absolute())
