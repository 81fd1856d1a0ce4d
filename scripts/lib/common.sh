# shellcheck shell=bash
# Shared by the scripts: where things are, what has to be installed, how progress is told. To be sourced by bash.
#
# Progress goes to stderr, so that a script's stdout is its result.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# Cargo's own setting is followed, so that a build outside the checkout is found.
target=${CARGO_TARGET_DIR:-$root/target}
# Programs of the repository answer in one language, and ask nobody anything.
export LC_ALL=C.UTF-8 GIT_TERMINAL_PROMPT=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 DEBIAN_FRONTEND=noninteractive
# What the rust toolchain must be at least; Cargo.toml names it.
rust_version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")

say() {
    printf '== %s\n' "$*" >&2
}

fail() {
    printf 'error: %s\n' "$1" >&2
    if [ $# -gt 1 ]; then printf 'hint: %s\n' "${*:2}" >&2; fi
    exit 1
}

# Seconds, for "took" lines.
now() {
    date +%s
}

# Prints the Debian packages that are missing for what the arguments name, one a line.
missing_packages() {
    local need
    for need in "$@"; do
        case $need in
            cc) command -v cc >/dev/null || echo gcc ;;
            c++) command -v c++ >/dev/null || echo g++ ;;
            # The shim is linked statically.
            libc) [ -e "$(cc -print-file-name=libc.a 2>/dev/null || echo /nonexistent)" ] || echo libc6-dev ;;
            # The system's own: one from a version manager lies outside /usr, which is all that a jail sees.
            python3) [ -x /usr/bin/python3 ] || echo python3 ;;
            venv) /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv ;;
            bwrap) command -v bwrap >/dev/null || echo bubblewrap ;;
            git) command -v git >/dev/null || echo git ;;
            curl | wget | openssl | npm | busybox) command -v "$need" >/dev/null || case $need in busybox) echo busybox-static ;; *) echo "$need" ;; esac ;;
            node) command -v node >/dev/null || echo nodejs ;;
            java) command -v java >/dev/null || echo default-jdk-headless ;;
            ssh) command -v ssh >/dev/null || echo openssh-client ;;
            sshd) [ -x /usr/sbin/sshd ] || echo openssh-server ;;
            psql) command -v psql >/dev/null || echo postgresql-client ;;
            postgres) compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || echo postgresql ;;
            go) command -v go >/dev/null || echo golang-go ;;
            mmdebstrap) command -v mmdebstrap >/dev/null || echo mmdebstrap ;;
            qemu) command -v qemu-system-x86_64 >/dev/null || echo qemu-system-x86 ;;
            mke2fs) command -v mke2fs >/dev/null || echo e2fsprogs ;;
            certificates) [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates ;;
            *) fail "the scripts do not know how to install $need" ;;
        esac
    done
}

# Installs what is missing: `need cc libc python3 …`. Not as root, it says what to install.
need() {
    local packages
    mapfile -t packages < <(missing_packages "$@")
    [ ${#packages[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ]; then
        fail "missing: ${packages[*]}" "as root: apt-get install ${packages[*]}"
    fi
    command -v apt-get >/dev/null || fail "missing, in Debian's names: ${packages[*]}" "install them with this system's package manager"
    say "installing ${packages[*]}"
    install_packages "${packages[@]}"
    mapfile -t packages < <(missing_packages "$@")
    [ ${#packages[@]} -eq 0 ] || fail "still missing after installing: ${packages[*]}"
}

install_packages() {
    local log
    log=$(mktemp)
    if ! apt-get install -y -qq --no-install-recommends "$@" >"$log" 2>&1 </dev/null; then
        # A fresh image has no package lists.
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } >"$log" 2>&1 </dev/null || {
            cat "$log" >&2
            rm -f "$log"
            fail "cannot install: $*"
        }
    fi
    rm -f "$log"
}

# Finds cargo, or installs it through the distribution's rustup.
need_rust() {
    if ! command -v cargo >/dev/null && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
        PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
        export PATH
    fi
    if ! cargo --version >/dev/null 2>&1; then
        if [ "$(id -u)" = 0 ] && apt-cache show rustup >/dev/null 2>&1; then
            say "installing rustup and the stable toolchain"
            command -v rustup >/dev/null || install_packages rustup
            rustup toolchain install stable --profile minimal --component clippy --component rustfmt >/dev/null 2>&1 </dev/null \
                || fail "rustup cannot install the stable toolchain" "rustup toolchain install stable"
            rustup default stable >/dev/null 2>&1
        else
            fail "no cargo" "install Rust $rust_version or later: https://rustup.rs, or Debian's package rustup and then 'rustup default stable'"
        fi
    fi
    local have
    have=$(cd "$root" && cargo --version | cut -d' ' -f2)
    if [ "$(printf '%s\n%s\n' "$rust_version" "$have" | sort -V | head -n 1)" != "$rust_version" ]; then
        fail "Rust $have is too old, $rust_version is needed" "rustup update stable (Debian's own cargo package is older than that)"
    fi
}

# Builds the two programs as they are released, and puts `tollgate` on the path.
build_release() {
    local began
    began=$(now)
    say "building (release)"
    (cd "$root" && cargo build --quiet --locked --release -p tollgate -p tollgate-shim </dev/null)
    say "built in $(($(now) - began)) s"
    PATH=$target/release:$PATH
    export PATH
}

# Whether a run can start here at all; what is missing and what to do, if not.
need_jail() {
    local said folder
    folder=$(mktemp -d)
    said=$(tollgate run --read-only --workspace "$folder" -- /bin/true 2>&1 </dev/null) || {
        printf '%s\n' "$said" >&2
        rm -rf "$folder"
        tollgate doctor >&2 || true
        fail "this machine cannot start a run" "the lines above say why"
    }
    rm -rf "$folder"
}

# A project from PyPI with its own tests, ready in folder $1: its source, and a virtual environment inside it.
#
# $2 is `name==version`, the rest are packages that its tests need. The environment is made from /usr/bin/python3 and
# lies in the workspace, so that a jail needs no view beyond the workspace and /usr.
fetch_project() {
    local folder=$1 project=$2 name=${2%%==*}
    shift 2
    if [ -e "$folder/.ready" ] && [ "$(cat "$folder/.ready")" = "$project $*" ]; then
        return 0
    fi
    say "fetching $project"
    rm -rf "$folder"
    mkdir -p "$folder"
    /usr/bin/python3 -m venv "$folder/.venv"
    local pip=("$folder/.venv/bin/python" -m pip --quiet)
    "${pip[@]}" download --no-deps --no-binary "$name" --dest "$folder/.sdist" "$project" </dev/null \
        || fail "cannot download $project" "this needs PyPI, or the index that pip is configured for"
    tar -xf "$folder/.sdist"/*.tar.gz -C "$folder" --strip-components=1
    rm -rf "$folder/.sdist"
    # One version of the runner, so that a later one's rules do not fail an earlier project's tests.
    "${pip[@]}" install "$folder" "pytest==8.3.5" "$@" </dev/null || fail "cannot install $project and what its tests need"
    printf '%s' "$project $*" >"$folder/.ready"
}
