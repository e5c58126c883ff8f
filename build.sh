#!/usr/bin/env bash
# Sets up DeepInfer and runs it.
#
#   ./build.sh                  set up: environment, requirements, native extensions, editable install
#   ./build.sh run [ARGS]       set up, then run examples/offline_inference.py
#   ./build.sh test [ARGS]      set up, then run the tests with pytest, in as many processes as cores
#
# The active virtual environment is used, else .venv is made. What is up to date is not done again.
#   DEEPINFER_ACCELERATOR=auto|cpu|nvidia|ascend   what to set up for (auto: what the machine has)
#   PYTHON, CXX                                    interpreter for .venv, C++ compiler
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD

readonly MIN_GCC=12
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu # the public index of CPU builds, see pytorch.org

say() { printf 'build.sh: %s\n' "$*"; }
die() {
    printf 'build.sh: %s\n' "$*" >&2
    exit 1
}

usage() { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

# Whether an interpreter runs and is a version that we support.
python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

python_version() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo "broken"; }

# The interpreter that a new .venv is made with.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON: no such program"
        python_fits "$PYTHON" || die "PYTHON=$PYTHON is Python $(python_version "$PYTHON"); 3.11, 3.12 or 3.13 is needed"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null && python_fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    if command -v python3 >/dev/null; then
        die "python3 is Python $(python_version python3); 3.11, 3.12 or 3.13 is needed (install it, or set PYTHON)"
    fi
    die "Python 3.11, 3.12 or 3.13 is needed (Debian: apt-get install python3 python3-venv python3-dev)"
}

# Sets `python` to the interpreter of the environment to install into; makes .venv where none is active.
enter_environment() {
    local base
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        python=$VIRTUAL_ENV/bin/python
        [ -x "$python" ] || die "VIRTUAL_ENV=$VIRTUAL_ENV holds no Python: deactivate it, or make it again"
        python_fits "$python" ||
            die "the active environment has Python $(python_version "$python"); 3.11, 3.12 or 3.13 is needed"
        return
    fi
    python=$root/.venv/bin/python
    if [ -x "$python" ] && python_fits "$python" && "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    base=$(find_python)
    "$base" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        die "$base lacks the venv module (Debian: apt-get install python3-venv)"
    say "making .venv with Python $(python_version "$base")"
    "$base" -m venv --clear .venv >/dev/null || die "$base -m venv failed"
}

# The compiler and Python's headers, before minutes go into downloads.
check_compiler() {
    local compiler version
    read -r -a compiler <<<"${CXX:-g++}"
    command -v "${compiler[0]}" >/dev/null ||
        die "no C++ compiler (${compiler[0]}): install GCC $MIN_GCC or newer (Debian: apt-get install g++), or set CXX"
    version=$("${compiler[@]}" -dumpfullversion -dumpversion 2>/dev/null) || die "${compiler[*]} does not run"
    if [ "${version%%.*}" -lt "$MIN_GCC" ] && ! "${compiler[@]}" --version | grep -qi clang; then
        die "${compiler[*]} is GCC $version; $MIN_GCC or newer is needed (install it, or set CXX)"
    fi
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        die "Python's headers are missing (Debian: apt-get install python3-dev)"
}

# What the machine has; the one definition is in deepinfer/native.py.
pick_accelerator() {
    accelerator=$("$python" -c '
import runpy, sys
try:
    print(runpy.run_path("deepinfer/native.py")["build_accelerator"]())
except ValueError as error:
    sys.exit(f"build.sh: {error}")') || exit 1
}

# Plain PyPI serves Linux on x86-64 a torch for CUDA, several GB of it. Where pip does not find a CPU build by
# itself, ask the index that PyTorch publishes them on; without either, the default build works as well.
torch_arguments() {
    local wanted
    wanted=$(sed -n 's/^torch==//p' requirements-cpu.txt)
    torch_args=()
    if [ "$accelerator" = nvidia ] || [ "$(uname -sm)" != "Linux x86_64" ]; then
        return
    fi
    if lists_torch "$wanted+cpu"; then
        return # the local version sorts above the plain one, so pip takes it
    fi
    if lists_torch "$wanted+cpu" --index-url "$TORCH_CPU_INDEX" --retries 0 --timeout 10; then
        torch_args=("torch==$wanted+cpu" --extra-index-url "$TORCH_CPU_INDEX")
    else
        say "no CPU build of torch $wanted within reach: taking the default build, a large download"
    fi
}

# Whether pip knows a version of torch; further arguments are pip's. Any failure means no.
lists_torch() {
    local version=$1 listing
    shift
    listing=$("$python" -m pip index versions torch "$@" 2>/dev/null) || return 1
    [[ $listing == *"$version"* ]]
}

# Requirements and the editable install, once per content of the files that name them.
install_requirements() {
    local requirements=requirements-$accelerator.txt prefix stamp wanted building
    local to_build=() to_test=()
    prefix=$("$python" -c 'import sys; print(sys.prefix)')
    stamp=$prefix/.deepinfer-$accelerator
    wanted=$("$python" - "$root" pyproject.toml requirements-*.txt build.sh <<'PY'
import hashlib, sys
digest = hashlib.sha256(f"{sys.argv[1]} {sys.version}".encode())
for name in sys.argv[2:]:
    digest.update(open(name, "rb").read())
print(digest.hexdigest())
PY
    )
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    mapfile -t to_build < <("$python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
    mapfile -t to_test < <("$python" -c '
import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras["test"], *extras["kernels"], sep="\n")')
    say "installing $requirements and the test tools (some hundred MB, a minute or more)"
    "$python" -m pip install -qq --disable-pip-version-check "${to_build[@]}" ||
        die "installing $requirements failed: see pip's message above"
    set -m # in a process group, which ends as one
    build_extensions & # the compiler has the cores while pip downloads; pip itself would hide its words
    set +m
    building=$!
    trap "kill -- -$building 2>/dev/null || :" EXIT
    torch_arguments
    "$python" -m pip install -qq --disable-pip-version-check \
        -r "$requirements" "${to_build[@]}" "${to_test[@]}" "${torch_args[@]+"${torch_args[@]}"}" ||
        die "installing $requirements failed: see pip's message above"
    wait "$building" || exit 1
    trap - EXIT
    "$python" -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e . ||
        die "installing the package failed: see pip's message above"
    echo "$wanted" >"$stamp"
}

build_extensions() {
    DEEPINFER_ACCELERATOR=$accelerator "$python" setup.py --quiet build_ext ||
        die "building the native extensions failed: see the message above"
}

set_up() {
    enter_environment
    check_compiler
    pick_accelerator
    install_requirements
    build_extensions
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
"")
    set_up
    say "ready for $accelerator with Python $(python_version "$python") in ${python%/bin/python}"
    say "next: ./build.sh run   answers a few prompts with the bundled model"
    say "      ./build.sh test  runs the tests"
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        say "      source .venv/bin/activate   for Python programs of your own"
    fi
    ;;
run)
    set_up
    exec "$python" examples/offline_inference.py "$@"
    ;;
test)
    set_up
    exec "$python" -m pytest --numprocesses auto --dist worksteal "$@"
    ;;
-h | --help | help) usage ;;
*) die "unknown command '$command': use ./build.sh, ./build.sh run or ./build.sh test" ;;
esac
