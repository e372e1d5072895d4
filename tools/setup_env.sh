#!/usr/bin/env bash
# Makes the environment .venv from requirements.lock, or brings it up to date; does nothing where it is current.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.set-up-from
# What every run imports: once here proves the installation and leaves the bytecode that later starts read.
needed="torch, transformers, tensorboard, matplotlib.pyplot, math_verify, reasoning_gym, megatron.core,
megatron.training.training, megatron.rl"

say() { printf '[setup] %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# A candidate counts only if it runs, is new enough and can make environments: a pyenv shim can exist and fail.
# megatron-core has wheels for 3.12 and 3.13 only.
usable() {
    "$@" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

find_python() {
    local candidate pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" && command -v "$PYTHON"
        return
    fi
    for candidate in python3.12 python3.13 python3 python \
        "$pyenv"/3.12.*/bin/python "$pyenv"/3.13.*/bin/python; do
        if usable "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# pycosat, which reasoning-gym needs, is published as C source only.
can_compile() {
    local compiler include
    compiler=$("$1" -c 'import os, sysconfig; print(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")')
    include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    # shellcheck disable=SC2086  # "gcc -pthread" is two words
    $compiler -I"$include" -fsyntax-only -x c - <<<'#include <Python.h>' 2>/dev/null
}

wanted_stamp() { pwd && cat requirements.lock; }

moved() { [ -f $stamp ] && [ "$(head -n 1 $stamp)" != "$(pwd)" ]; }

install_locked() {
    local quiet=--quiet uv
    if [ -t 2 ]; then quiet=; fi
    uv=$(grep -oE '^uv==[0-9.]+' requirements.lock)
    if $venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check "$uv" \
        && $venv/bin/uv pip install --python $venv/bin/python $quiet --system-certs -r requirements.lock; then
        return 0
    fi
    say "uv could not install the packages; using pip, which takes a few minutes longer"
    $venv/bin/python -m pip install --disable-pip-version-check --no-compile --progress-bar off -r requirements.lock
}

if [ -x $venv/bin/python ] && cmp -s <(wanted_stamp) $stamp; then
    exit 0
fi
start=$SECONDS
if moved || ! usable $venv/bin/python || ! $venv/bin/python -c "import pip" 2>/dev/null; then
    python=$(find_python) || fail "no Python 3.12 or 3.13 with venv found (${PYTHON:-python3.12, python3.13, pyenv});" \
        "install one, for example with 'pyenv install 3.12', or name one with PYTHON=/path/to/python"
    can_compile "$python" || fail "$python cannot compile C extensions, which one package needs; install a C compiler" \
        "and Python's headers, for example with 'apt-get install gcc python3-dev'"
    say "making $venv with $("$python" --version) ($python)"
    rm -rf $venv
    "$python" -m venv $venv
    say "installing the packages of requirements.lock (about 3 GB to download, 5 GB on disk)"
else
    say "bringing $venv up to date with requirements.lock"
fi
rm -f $stamp
install_locked
say "installing this project into $venv"
$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
say "checking that everything imports"
if ! log=$(env -u PYTHONDONTWRITEBYTECODE $venv/bin/python -W ignore -c "import ${needed//$'\n'/ }" 2>&1); then
    fail "the packages in $venv do not import (${log##*$'\n'}); 'make clean' and try again"
fi
wanted_stamp >$stamp
say "done in $((SECONDS - start)) s"
