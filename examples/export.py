"""Save a model that computes with pkg's operators, and run what was saved in a new process.

Two kinds of file: an exported program (torch.export.save), which PyTorch runs in Python, and a
package of compiled code (AOTInductor), which holds the kernels that torch.compile makes and calls
pkg's by name. Both take any batch and length. The new process imports pkg, which registers its
operators, and nothing of the model's sources; then the results are compared. A second process
shows what is said where pkg is not imported.

    python examples/export.py
    python examples/export.py --without-package

AOTInductor needs a C++ compiler and half a minute or more; --without-package leaves it out. The
exit status is 0 when the results agree.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import needs

with needs.words_for_missing_packages("export.py"):
    import torch
    from torch import Tensor

    import pkg

OUTPUT = Path(__file__).resolve().parent / "output" / "export"

RUN = """
import sys, torch
{first_line}
input, expected = torch.load(sys.argv[2])
if sys.argv[1].endswith("program.pt2"):
    model = torch.export.load(sys.argv[1]).module()
else:
    model = torch._inductor.aoti_load_package(sys.argv[1])
with torch.no_grad():
    result = model(input)
    model(input[:1, :2])
# One rounding may be another where torch.compile has fused what follows a product.
torch.testing.assert_close(result, expected)
print("agrees: largest difference", float((result - expected).abs().max()))
"""


class Block(torch.nn.Module):
    """Attention and a perceptron, of pkg's modules and operators."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.projection = pkg.nn.Linear(width, 3 * width)
        self.output = pkg.nn.Linear(width, width)
        self.up = pkg.nn.Linear(width, 4 * width, activation="gelu")
        self.down = pkg.nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        joined = self.projection(self.norm(stream)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in joined.unbind(2))
        mixed = pkg.ops.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.output(mixed.transpose(1, 2).flatten(2))
        return stream + self.down(self.up(stream))


def run_in_a_new_process(file: Path, example: Path, *, imports_pkg: bool) -> bool:
    """Whether a process that knows nothing of the model computes the same with the file."""
    code = RUN.format(first_line="import pkg" if imports_pkg else "")
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), str(example)],
        capture_output=True,
        text=True,
        check=False,
        cwd=file.parent,  # not in a checkout, whose pkg may not be built
    )
    if done.returncode == 0:
        print(f"{file.name}: {done.stdout.strip()}")
    else:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        # Of all that PyTorch says, what names the operators.
        named = [line for line in said if "pkg::" in line] or said
        print(f"{file.name}, with{'' if imports_pkg else 'out'} import pkg: {named[-1].strip()}")
    return done.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="export.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--without-package", action="store_true", help="save the exported program alone"
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FOLDER", help=f"default {OUTPUT}"
    )
    options = parser.parse_args(arguments)
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Block().eval()
    input = torch.randn(2, 10, 64)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2)
    files = [output / "program.pt2"]
    example = output / "example.pt"
    with torch.no_grad():
        torch.save((input, model(input)), example)
        program = torch.export.export(model, (input,), dynamic_shapes=({0: batch, 1: length},))
        torch.export.save(program, files[0])
        if not options.without_package:
            files.append(output / "package.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=str(files[1]))
    agree = [run_in_a_new_process(file, example, imports_pkg=True) for file in files]
    run_in_a_new_process(files[-1], example, imports_pkg=False)
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
