# Sourced by the scripts beside it: makes .venv, installs the package for development, puts both on PATH.
#
# The stamp is written after a complete install and is a hash of what was asked for, so a second run calls no
# pip, and an interrupted first run is done again.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

_venv_works() {
    # A virtual environment knows where it lies; one that was moved is made anew.
    grep -qF "$root/.venv" .venv/bin/activate 2>/dev/null && .venv/bin/python -c 'import pip' 2>/dev/null
}

_fingerprint() {
    { cat pyproject.toml scripts/constraints.txt && .venv/bin/python -V; } | sha256sum
}

_install() {
    local fingerprint
    _venv_works || "${PYTHON:-python3}" -m venv --clear .venv
    fingerprint=$(_fingerprint)
    [[ "$(cat .venv/sharedmirror.stamp 2>/dev/null)" == "$fingerprint" ]] && return
    echo "installing into .venv" >&2
    rm -f .venv/sharedmirror.stamp
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e '.[dev]' >&2
    echo "$fingerprint" >.venv/sharedmirror.stamp
}

_install
export PATH="$root/.venv/bin:$PATH"
