#!/usr/bin/env bash
# Tests the CPU library avx2_vnni on a processor that has VNNI in AVX-512 alone,
# such as Zen 4: built with the same instructions in AVX-512's encoding, it runs
# there under the name of avx2. Processors that have AVX-VNNI need no such thing.
#
#   tools/test_avx_vnni.sh [pytest's arguments]
#
# PYTHON is an interpreter, by its path or from the checkout on, with what the
# tests need. Linux, GCC.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python}")
[[ $python == /* ]] || python="$PWD/$python"
grep -qw avx512_vnni /proc/cpuinfo || {
  echo "this processor has no AVX-512 VNNI, whose encoding the library is to be run in" >&2
  exit 1
}
tests=(tests/ops tests/test_c_functions.py -m "not tracing" -q -p no:cacheprovider)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin" "$work/copy"
git ls-files -z | tar --null --files-from=- --create | tar --directory="$work/copy" --extract

# An assembler: the last argument is what GCC has written.
cat > "$work/bin/as" << END
#!/bin/sh
for source; do :; done
sed -i 's/{vex} vpdpbusd/{evex} vpdpbusd/' "\$source"
exec $(command -v as) "\$@"
END
chmod +x "$work/bin/as"

cd "$work/copy"
export PKG_BUILD_CUDA=0 PKG_CPU_LEVELS=avx2_vnni PKG_EXTRA_CFLAGS_AVX2_VNNI="-B$work/bin"
CCACHE_BASEDIR="$PWD" "$python" setup.py --quiet build_ext --inplace
for library in pkg/_cpu_avx2_vnni.*; do
  mv "$library" "${library/avx2_vnni/avx2}"
done
PKG_CPU_CAPABILITY=avx2 OMP_WAIT_POLICY=passive PYTHONPATH="$PWD" \
  "$python" -m pytest "${tests[@]}" "$@"
