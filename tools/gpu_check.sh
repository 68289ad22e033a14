#!/usr/bin/env bash
# Checks the CUDA operators on this machine's GPU, with nothing downloaded: builds the package,
# runs the suite on CUDA and a sample of calls under compute-sanitizer, then times each operator
# beside PyTorch's and writes benchmarks/results/<gpu>-<date>.json.
#
#   tools/gpu_check.sh                  everything; the suite is most of it
#   tools/gpu_check.sh --device cpu     the same steps on the CPU, to try the script itself
#   tools/gpu_check.sh --installed      with the pkg that is installed, or in PYTHONPATH: nothing is built
#   tools/gpu_check.sh --times          the figures alone, each when its result has been verified
#
# PYTHON names the interpreter whose PyTorch is used, RESULTS the folder of the figures. Nothing is
# installed: the build goes to a temporary folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
results=${RESULTS:-$root/benchmarks/results}
device=cuda
builds=1
checks=1

usage() { sed -n '2,12s/^# \{0,1\}//p' "$0"; }
refuse() { printf 'gpu_check: %s\n' "$*" >&2; exit 2; }
step() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }

while (($#)); do
  case $1 in
    --device) device=${2:-}; shift ;;
    --installed) builds=0 ;;
    --times) checks=0 ;;
    --help | -h) usage; exit ;;
    *) refuse "no option is called $1; --help says which there are" ;;
  esac
  shift
done
[[ $device == cuda || $device == cpu ]] || refuse "--device must be cuda or cpu"

command -v "$python" > /dev/null || refuse "there is no $python: set PYTHON to a Python 3.10 or newer"
if [[ $device == cuda ]] && ((builds)); then
  command -v nvcc > /dev/null || [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]] ||
    refuse "there is no nvcc in PATH or CUDA_HOME: install the CUDA toolkit"
fi
architecture=$("$python" "$root/tools/gpu_check.py" requirements --device "$device") ||
  refuse "this machine cannot run the check, see above"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ((builds)); then
  step "Build"
  export PKG_CUDA_ARCH_LIST=${PKG_CUDA_ARCH_LIST:-$architecture}
  [[ $device == cuda ]] || export PKG_BUILD_CUDA=0
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --target "$work/site" "$root"
  export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
fi

# Away from the checkout, whose pkg/ without libraries would be imported instead.
cp -r "$root/tests" "$root/pyproject.toml" "$work"
cd "$work"
"$python" -c 'import pkg; print(pkg.__file__)'

if ((checks)); then
  step "The suite on $device"
  workers=()
  # The tests that compile a model keep one core busy each; the GPU is shared.
  "$python" -c 'import xdist' 2> /dev/null && workers=(-n "$(($(nproc) / 2 + 1))")
  "$python" -m pytest -q tests/ops -k "$device" -p no:cacheprovider "${workers[@]}"

  step "Every operator, in every way"
  "$python" "$root/tools/gpu_check.py" sample --device "$device"

  if [[ $device == cuda ]]; then
    step "Every kernel under compute-sanitizer"
    if ! command -v compute-sanitizer > /dev/null; then
      echo "SKIPPED: there is no compute-sanitizer in PATH"
    else
      for tool in memcheck racecheck; do
        status=0
        compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name kns=pkg4cuda \
          "$python" "$root/tools/gpu_check.py" sample --plain > "$work/$tool.log" 2>&1 || status=$?
        if grep -q 'Device not supported' "$work/$tool.log"; then
          echo "SKIPPED: compute-sanitizer does not support this device ($tool)"
        else
          tail -n 3 "$work/$tool.log"
          ((status == 0)) || { cat "$work/$tool.log"; refuse "$tool found errors, see above"; }
        fi
      done
    fi
  fi
fi

step "Times"
"$python" "$root/tools/gpu_check.py" time --device "$device" --folder "$results"

if [[ $device == cuda ]]; then
  step "Times with float32 in TF32"
  "$python" "$root/tools/gpu_check.py" time --float32 high --folder "$results/tf32" matmul linear
fi

if [[ $architecture == 9.0a ]]; then
  step "Times without products of warpgroups, and of attention in float32 without copied panels"
  PKG_CUDA_WARPGROUPS=0 PKG_CUDA_COPIED_ATTENTION=0 "$python" "$root/tools/gpu_check.py" time \
    --folder "$results/without_warpgroups" matmul linear scaled_dot_product_attention
  step "Times without early launches"
  PKG_CUDA_EARLY_LAUNCHES=0 "$python" "$root/tools/gpu_check.py" time \
    --folder "$results/without_early_launches" matmul int4_linear decode_attention lltm_sequence
  step "Times without joint gradients"
  PKG_CUDA_JOINT_GRADIENTS=0 "$python" "$root/tools/gpu_check.py" time \
    --folder "$results/without_joint_gradients" scaled_dot_product_attention
fi

step "Done"
