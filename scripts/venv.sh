# Sourced: enters the repository's root and makes .venv with the tested versions.
# install_venv [GROUP] calls pip only if pyproject.toml or the constraints changed since its last call.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    done
    echo "vlmrun needs Python 3.11 or newer; python3 here is $(python3 --version 2>/dev/null || echo missing)" >&2
    return 1
}

install_venv() {
    local stamp=".venv/installed${1:+-$1}" wanted
    wanted=$(cat pyproject.toml scripts/constraints.txt | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    if [ ! -x .venv/bin/pip ]; then find_python; "$python" -m venv .venv; fi
    echo "installing vlmrun with the tested versions into .venv" >&2
    .venv/bin/python -m pip install --quiet -c scripts/constraints.txt pip >&2  # knows --group
    .venv/bin/python -m pip install --quiet -c scripts/constraints.txt -e . ${1:+--group "$1"} >&2
    echo "$wanted" | tee .venv/installed >"$stamp"
}
