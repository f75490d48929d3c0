# Makes or reuses a virtual environment in the checkout and installs the project into it. Sourced, not run.
#
#   find_python 3.12 3.11      prints the first interpreter of these versions that really starts
#   make_venv PYTHON EXTRAS    sets $VENV (.venv-3.x); installs again only when pyproject.toml or EXTRAS changed

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local version candidate
    for version in "$@"; do
        for candidate in "python$version" python3 \
            "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
            # A shim on PATH may name a version that is not there: ask the interpreter itself.
            if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
                command -v "$candidate"
                return 0
            fi
        done
    done
    return 1
}

make_venv() {
    local python=$1 extras=$2 version stamp
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    VENV="$ROOT/.venv-$version"
    stamp="$(cksum <"$ROOT/pyproject.toml") $extras $ROOT"
    if [ -f "$VENV/installed-$extras" ] && [ "$(cat "$VENV/installed-$extras")" = "$stamp" ]; then
        return 0
    fi
    echo "Installing ninfer-jax[$extras] into $VENV (Python $version) ..." >&2
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --upgrade pip
    "$VENV/bin/python" -m pip install --quiet --editable "$ROOT${extras:+[$extras]}"
    echo "$stamp" >"$VENV/installed-$extras"
}

require_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" || { echo "PYTHON=$PYTHON is not an interpreter." >&2; return 1; }
        return 0
    fi
    find_python 3.12 3.11 || {
        echo "NInfer-JAX needs Python 3.11 or 3.12; neither was found. Set PYTHON=/path/to/python." >&2
        return 1
    }
}
