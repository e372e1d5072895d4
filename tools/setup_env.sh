#!/usr/bin/env bash
# Makes the environment .venv from requirements.lock, once; does nothing where it is already there and current.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.installed-from

say() { printf '[setup] %s\n' "$*"; }

# A candidate counts only if it runs, is new enough and can make environments: a pyenv shim can exist and fail.
usable() {
    "$@" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.13 python3 python; do
        if [ -n "$candidate" ] && usable "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
        if usable "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

current() {
    [ -x $venv/bin/python ] && [ -f $stamp ] && cmp -s requirements.lock $stamp
}

install_locked() {
    if $venv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9 \
        && $venv/bin/uv pip install --python $venv/bin/python --quiet --system-certs -r requirements.lock; then
        return 0
    fi
    say "uv could not install the packages; using pip, which takes a minute or two longer"
    $venv/bin/python -m pip install --disable-pip-version-check --no-compile --progress-bar off -r requirements.lock
}

if current; then
    exit 0
fi
if ! python=$(find_python); then
    echo "error: no Python 3.12 or 3.13 found (python3.12, python3.13, pyenv); install one, for example with" \
        "'pyenv install 3.12' or your system's packages, or name it with PYTHON=/path/to/python" >&2
    exit 2
fi
start=$SECONDS
say "making $venv with $("$python" --version) ($python)"
rm -rf $venv
"$python" -m venv $venv
say "installing the packages of requirements.lock (about 3 GB to download, 5 GB on disk)"
install_locked
say "installing this project into $venv"
$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
cp requirements.lock $stamp
say "done in $((SECONDS - start)) s"
