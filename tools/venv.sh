#!/usr/bin/env bash
# Make the virtual environment $1 for development: Python 3.11 or newer with the pins of requirements/.
# Honours PYTHON. With TORCH=2.11 (or newest) that torch, and the few pins of requirements/versions.txt.
# With REQUIREMENTS=file that file's packages alone, each of a hash that it lists.
# Downloads a CPU torch where no NVIDIA GPU is found and the CPU index of PyTorch can be reached.
set -euo pipefail
venv=${1:?usage: tools/venv.sh DIRECTORY}
here=$(cd "$(dirname "$0")/.." && pwd)

usable() {
  command -v "$1" >/dev/null && "$1" - <<'PY' >/dev/null 2>&1
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info >= ((3, 10) if os.environ.get("TORCH") else (3, 11))
assert os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h"))
PY
}

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 /usr/bin/python3}; do
  if usable "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "error: no usable Python ${PYTHON:+($PYTHON) }found: Python 3.11 or newer with venv and headers is needed" >&2
  echo "       (Debian, Ubuntu: apt-get install python3-venv python3-dev); PYTHON=/path/to/python picks one" >&2
  exit 1
fi

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ -n "${REQUIREMENTS:-}" ]; then
  pip install -qq --require-hashes --only-binary :all: -r "$here/$REQUIREMENTS"
  exit
fi

index=()
if [ ! -e /dev/nvidia0 ] && ! command -v nvidia-smi >/dev/null; then
  cpu_index=https://download.pytorch.org/whl/cpu
  if "$venv/bin/python" - "$cpu_index/" <<'PY' >/dev/null 2>&1; then
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=3)
PY
    index=(--extra-index-url "$cpu_index") # 2.x.y+cpu counts as newer than 2.x.y, so pip prefers it
  fi
fi
if [ -n "${TORCH:-}" ]; then
  torch="torch==$TORCH.*"
  case $TORCH in newest) torch=torch ;; *.*.*) torch="torch==$TORCH" ;; esac
  pip install -qq --upgrade "${index[@]}" "$torch"
  pip install -qq -r "$here/requirements/versions.txt"
  exit
fi
pip install -qq "${index[@]}" -r "$here/requirements/torch.txt" -c "$here/requirements/dev.txt"
pip install -qq -r "$here/requirements/dev.txt"
