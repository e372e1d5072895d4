#!/usr/bin/env bash
# Makes the environment of a rollout engine's server for CPUs from tools/engines/ENGINE.lock, or brings it up to date;
# does nothing where it is current.
#
#     tools/setup_engine.sh vllm|sglang [FOLDER]     FOLDER: .venv-vllm or .venv-sglang unless given
#
# PYTHON names the interpreter it is made with (default: that of .venv), UV the installer (default: that of .venv).
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '[setup] %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

engine=${1:-}
lock=tools/engines/$engine.lock
case $engine in
# What a server imports first: once here proves the installation and leaves the bytecode that later starts read.
vllm) needed="vllm, vllm.entrypoints.launchers.api_server.entry, megatron.rl.rollout.vllm_plugin" ;;
sglang) needed="sglang.srt.entrypoints.http_server" ;;
*) fail "which engine? usage: tools/setup_engine.sh vllm|sglang [FOLDER]" ;;
esac
venv=${2:-.venv-$engine}
stamp=$venv/.set-up-from
uv=${UV:-.venv/bin/uv}
python=${PYTHON:-.venv/bin/python}

wanted_stamp() { pwd && cat "$lock" pyproject.toml; }

if [ -x "$venv/bin/python" ] && cmp -s <(wanted_stamp) "$stamp"; then
    exit 0
fi
[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || fail "$lock is for Linux on x86_64; elsewhere and on GPUs install" \
    "$engine by its own manual and name its Python"
[ -x "$uv" ] && [ -x "$python" ] || fail "$uv or $python is missing; run 'make env' first, or set UV and PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' \
    || fail "$lock is for Python 3.12, $python is $("$python" --version 2>&1); name another one with PYTHON="
start=$SECONDS
say "bringing $venv in line with $lock (about 5 GB on disk, less where uv's cache is on the same disk)"
[ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "$python" "$venv"
rm -f "$stamp"
"$uv" pip sync --quiet --system-certs --python "$venv/bin/python" --require-hashes "$lock"
say "installing this project into $venv, for its plugins, without what it needs itself"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
say "checking that everything imports"
if ! log=$(env -u PYTHONDONTWRITEBYTECODE PYTHONPATH="$PWD/megatron/rl/rollout/servers/cpu_modules" VLLM_NO_USAGE_STATS=1 \
    "$venv/bin/python" -W ignore -c "import $needed" 2>&1); then
    fail "the packages in $venv do not import (${log##*$'\n'}); remove the folder and try again"
fi
wanted_stamp >"$stamp"
say "done in $((SECONDS - start)) s"
