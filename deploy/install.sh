#!/bin/sh
# Installs EdgeShard on this machine, upgrades it, and removes it. `sh install.sh --help` says how.
#
# What it makes, below PREFIX (/opt/edgeshard for root, ~/.local/share/edgeshard for others):
#   versions/VERSION-DIGEST/   a virtual environment, this script and requirements.txt; `installed` in it is written
#                              last, when it works; `before` names the version that was in use before
#   current                    a link to the one that is used; an upgrade moves it by one rename
#   .in-use                    the version that services were last restarted with
#   .edgeshard-prefix          says that the directory is this script's, where `edgectl` is linked; locked while it runs
# and the link `edgectl` in /usr/local/bin or ~/.local/bin (with --prefix, in PREFIX/bin).
#
# It may be killed at any step: the old installation keeps working, and the next run removes the
# remains.
set -eu
umask 022

usage() {
    cat <<'EOF'
sh install.sh [--wheels DIR | --index URL] [--prefix DIR] [--delete-wheels] [--join TOKEN [-- OPTIONS]]
    Installs EdgeShard, or upgrades it in place. It needs Linux with glibc 2.28 or newer, and Python 3.11 to 3.13.
    --wheels DIR      from a folder: *.whl, and requirements.txt with their versions and hashes
    --index URL       from a package index, as requirements.txt beside this script says. Without --wheels and --index,
                      from the index that pip is configured for
    --prefix DIR      where to; otherwise /opt/edgeshard for root and ~/.local/share/edgeshard for others
    --delete-wheels   removes the folder of --wheels once all of it is installed
    --join TOKEN      joins the site of the token then, as `edgectl join TOKEN OPTIONS`; - reads it from standard input.
                      As root on a machine with systemd that installs the agent as a service
sh install.sh back [--prefix DIR]
    Puts the version before in the place of the one in use.
sh install.sh remove [--prefix DIR]
    Stops and removes the services, then the programs. State stays: identities, models, settings.
sh install.sh purge [--prefix DIR] [--yes]
    Removes state, too. It asks, unless --yes answers.
EOF
}

say() { printf '%s\n' "install.sh: $*"; }

fail() {
    printf '%s\n' "install.sh: $*" >&2
    exit 1
}

is_root() { [ "$(id -u)" -eq 0 ]; }

# ---- The command line

read_arguments() {
    action=install wheels='' index='' prefix='' token='' yes='' delete_wheels=''
    case ${1-} in back | remove | purge) action=$1 && shift ;; esac
    while [ $# -gt 0 ]; do
        case $1 in
            --wheels | --index | --prefix | --join) [ $# -ge 2 ] || fail "$1 needs a value; --help says how" ;;
        esac
        case $1 in
            --wheels) wheels=$2 && shift 2 ;;
            --index) index=$2 && shift 2 ;;
            --prefix) prefix=$2 && shift 2 ;;
            --join) token=$2 && shift 2 ;;
            --delete-wheels) delete_wheels=yes && shift ;;
            --yes) yes=yes && shift ;;
            --help | -h) usage && exit 0 ;;
            --) break ;;
            *) fail "$1 is no option; --help lists them" ;;
        esac
    done
    [ -z "$wheels" ] || [ -z "$index" ] || fail "--wheels and --index are two ways: give one"
    [ -z "$delete_wheels" ] || [ -n "$wheels" ] || fail "--delete-wheels goes with --wheels DIR"
    choose_places
}

choose_places() {
    if [ -n "$prefix" ]; then
        case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
        bin=$prefix/bin
    elif is_root; then
        prefix=/opt/edgeshard bin=/usr/local/bin
    else
        prefix=$HOME/.local/share/edgeshard bin=$HOME/.local/bin
    fi
    case $prefix in *[!A-Za-z0-9/._+-]*) fail "--prefix $prefix: use letters, digits and /._+- alone" ;; esac
    marker=$prefix/.edgeshard-prefix
    [ ! -s "$marker" ] || bin=$(cat "$marker")
}

# No directory of another owner is written to, and two runs exclude each other: the lock is held
# until this process ends.
take_prefix() {
    if [ ! -e "$marker" ] && [ -n "$(ls -A "$prefix" 2>/dev/null)" ]; then
        fail "$prefix has files that are not of this script: move them away, or give --prefix DIR"
    fi
    mkdir -p "$prefix" || fail "$prefix cannot be made: run this as its owner, or give --prefix DIR"
    { exec 9>>"$marker"; } 2>/dev/null || fail "$prefix cannot be written: run this as its owner, or give --prefix DIR"
    ! command -v flock >/dev/null || flock -n 9 || fail "another install.sh is at work in $prefix: wait for its end"
}

# ---- This machine

check_machine() {
    machine=$(uname -m)
    [ "$machine" != arm64 ] || machine=aarch64
    case $(uname -s)-$machine in
        Linux-x86_64 | Linux-aarch64) ;;
        *) fail "this is $(uname -s) on $machine; EdgeShard needs Linux on x86_64 or aarch64" ;;
    esac
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || fail "this system has no glibc; EdgeShard needs 2.28 or newer"
    glibc=${glibc#glibc }
    [ "${glibc%%.*}" -gt 2 ] || [ "${glibc#*.}" -ge 28 ] || fail "this is glibc $glibc; EdgeShard needs 2.28 or newer"
}

# The requirements are in the folder, or next to this script.
find_requirements() {
    if [ -n "$wheels" ]; then
        wheels=$(cd "$wheels" 2>/dev/null && pwd) || fail "--wheels: there is no such folder"
        requirements=$wheels/requirements.txt
        ls "$wheels" | grep -Eq "^edgeshard-.*(any|_$machine)\.whl$" ||
            fail "--wheels $wheels has no EdgeShard for $machine: take the folder of this platform"
    else
        requirements=$(cd "$(dirname "$0")" && pwd)/requirements.txt
    fi
    [ -r "$requirements" ] || fail "$requirements is missing: it says which files may be installed, by their hashes"
    version=$(sed -n 's/^edgeshard\(\[[^]]*\]\)\{0,1\}==\([A-Za-z0-9.+!]*\).*/\2/p' "$requirements")
    [ -n "$version" ] || fail "$requirements does not name edgeshard==VERSION"
}

# A folder with wheels such as numpy-2.4.0-cp311-cp311-... is only for Python 3.11.
find_python() {
    wanted=$([ -z "$wheels" ] || ls "$wheels" | sed -n 's/.*-cp3\([0-9]*\)-cp3\1-.*/3.\1/p' | sort -u | head -n 1)
    for name in python3.13 python3.12 python3.11 python3; do
        python=$(command -v "$name") || continue
        found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $found in 3.11 | 3.12 | 3.13) ;; *) continue ;; esac
        [ -z "$wanted" ] || [ "$found" = "$wanted" ] || continue
        return 0
    done
    fail "no Python ${wanted:-3.11, 3.12 or 3.13} was found: install it (Debian 12 and 13, Ubuntu 24.04 and newer:
            apt-get install python3; Fedora and RHEL: dnf install python3.12), or take the folder of your Python"
}

say_torch() {
    torch=$(ls "$wheels" 2>/dev/null | sed -n 's/^torch-\([^-]*\)-.*/\1/p')
    if [ ! -e /proc/driver/nvidia/version ]; then
        say "no NVIDIA driver is loaded: this machine computes on its processor"
    elif [ "${torch%+cpu}" != "$torch" ]; then
        say "an NVIDIA driver is loaded, but torch $torch is for processors: a folder with CUDA's would use the GPU"
    else
        say "an NVIDIA driver is loaded: torch ${torch:-of the index} can use the GPU (--device cuda)"
    fi
}

# Wheels state their unpacked size; bytecode and blocks take half of that again. For an index the
# size is unknown.
check_disk() {
    [ -n "$wheels" ] || return 0
    needed=$("$python" -c 'import sys, zipfile
sizes = (item.file_size for path in sys.argv[1:] for item in zipfile.ZipFile(path).infolist())
print(sum(sizes) * 3 // 2 // 1024)' "$wheels"/*.whl) || fail "a wheel in $wheels is damaged: fetch the folder again"
    free=$(df -Pk "$prefix" | awk 'NR == 2 { print $4 }')
    say "$prefix: $((needed / 1024)) MB are needed, $((free / 1024)) MB are free"
    [ "$free" -ge "$needed" ] || fail "$((needed * 1024)) bytes are needed on the disk of $prefix," \
        "where $((free * 1024)) bytes are free: free space, or give --prefix DIR"
}

# ---- Installation

install() {
    check_machine
    find_requirements
    find_python
    say "$machine, glibc $glibc, Python $found ($python), into $prefix"
    say_torch
    take_prefix
    remove_unfinished
    digest=$({ cat "$requirements" && echo "$found"; } | sha256sum | cut -c 1-12)
    new=versions/$version-$digest
    if [ -e "$prefix/$new/installed" ]; then
        say "EdgeShard $version is installed already, from the same files"
    else
        check_disk
        trap 'rm -rf "$prefix/$new"' EXIT
        trap 'exit 130' INT TERM
        make_environment
        trap - EXIT INT TERM
    fi
    switch_to_it
    if [ -n "$delete_wheels" ]; then
        say "removing $wheels"
        rm -rf "$wheels"
    fi
}

remove_unfinished() {
    rm -f "$prefix/current.new"
    for directory in "$prefix"/versions/*; do
        [ -d "$directory" ] && [ ! -e "$directory/installed" ] || continue
        say "removing $directory, which an earlier run did not finish"
        rm -rf "$directory"
    done
}

# Without its `installed` a version counts as unfinished, also when its removal is interrupted.
remove_versions() {
    for directory; do rm -f "$directory/installed"; done
    rm -rf "$@"
}

# The environment is made without pip, which Debian keeps apart: pip's own wheel is a program.
make_environment() {
    say "making a virtual environment in $prefix/$new"
    mkdir -p "$prefix/versions"
    "$python" -m venv --without-pip "$prefix/$new" || fail "$python made no environment (see above)"
    find_pip
    say "installing EdgeShard $version by pip, which checks each file by its hash in $requirements"
    set -- --require-hashes --only-binary :all: --no-cache-dir --no-compile --no-input --disable-pip-version-check -q
    if [ -n "$wheels" ]; then
        PIP_CONFIG_FILE=/dev/null "$prefix/$new/bin/python" $pip install --isolated "$@" --no-index \
            --find-links "$wheels" -r "$requirements" || fail "pip failed (see above); nothing was changed"
    else
        "$prefix/$new/bin/python" $pip install "$@" ${index:+--index-url "$index"} -r "$requirements" ||
            fail "pip failed (see above); nothing was changed"
    fi
    say "compiling its Python files, on all cores"
    "$prefix/$new/bin/python" -m compileall -q -j 0 "$prefix/$new/lib" >/dev/null || true # some are templates
    "$prefix/$new/bin/edgectl" --version >/dev/null || fail "the new edgectl does not run; nothing was changed"
    cp "$0" "$prefix/$new/install.sh"
    cp "$requirements" "$prefix/$new/requirements.txt"
    sync -f "$prefix/$new" 2>/dev/null || sync
    : >"$prefix/$new/installed"
}

find_pip() {
    pip=$(ls "$wheels"/pip-*-none-any.whl 2>/dev/null | head -n 1) || pip=''
    if [ -z "$wheels" ] || [ -z "$pip" ]; then
        pip='-m pip'
        "$prefix/$new/bin/python" -m ensurepip >/dev/null 2>&1 || fail "there is no pip: put its wheel into the folder
            (pip download --no-deps pip), or install ensurepip (on Debian: apt-get install python3-venv)"
        return
    fi
    grep -q "$(sha256sum <"$pip" | cut -d ' ' -f 1)" "$requirements" || fail "$pip is not the file of $requirements"
    case $pip in *' '*) fail "$wheels: pip's wheel is a program here, whose path must be without spaces" ;; esac
    pip=$pip/pip
}

# One rename: at every moment `current` is a whole installation. The one before stays, for processes that still run.
switch_to_it() {
    before=$(readlink "$prefix/current") || before=''
    if [ "$before" != "$new" ]; then
        say "switching $prefix/current to $new"
        echo "$before" >"$prefix/$new/before"
        ln -s "$new" "$prefix/current.new"
        mv -fT "$prefix/current.new" "$prefix/current"
        for directory in "$prefix"/versions/*; do
            case versions/${directory##*/} in "$new" | "$before") ;; *) remove_versions "$directory" ;; esac
        done
    fi
    if [ "$(cat "$prefix/.in-use" 2>/dev/null)" != "$new" ]; then
        restart_services
        echo "$new" >"$prefix/.in-use"
    fi
    mkdir -p "$bin"
    if [ "$(readlink "$bin/edgectl")" != "$prefix/current/bin/edgectl" ]; then
        [ ! -e "$bin/edgectl" ] || [ -L "$bin/edgectl" ] || fail "$bin/edgectl is there and not of this script: move it
            away, or run $prefix/current/bin/edgectl"
        say "linking $bin/edgectl"
        ln -sfn "$prefix/current/bin/edgectl" "$bin/edgectl"
    fi
    echo "$bin" >"$marker"
    case :$PATH: in *:"$bin":*) ;; *) say "$bin is not on the PATH of this shell: add it, or run $bin/edgectl" ;; esac
}

back() {
    [ -e "$marker" ] || fail "there is nothing to go back to: no EdgeShard of this script is in $prefix"
    take_prefix
    new=$(cat "$prefix/current/before" 2>/dev/null) || new=''
    [ -n "$new" ] && [ -e "$prefix/$new/installed" ] || fail "$prefix has no version before the one in use"
    switch_to_it
    say "$("$prefix/current/bin/edgectl" --version) is in use"
}

# ---- Services, which edgectl lays out (as root, on a machine that systemd runs)

services() {
    is_root || return 0
    for daemon in agent coordinator; do
        ! grep -qs "\"$prefix/" "/etc/edgeshard/$daemon.installed.json" || echo "$daemon"
    done
}

restart_services() {
    [ -d /run/systemd/system ] || return 0
    for daemon in $(services); do
        say "bringing the service edgeshard-$daemon up to date, and restarting it where it runs"
        "$prefix/current/bin/edgectl" install "$daemon" 9>&-
        systemctl try-restart "edgeshard-$daemon"
    done
}

# ---- Removal

remove() {
    if [ ! -e "$marker" ]; then
        say "nothing to remove: no EdgeShard of this script is in $prefix"
        return
    fi
    take_prefix
    for daemon in $(services); do
        [ -d /run/systemd/system ] || break
        say "stopping and removing the service edgeshard-$daemon"
        "$prefix/current/bin/edgectl" uninstall "$daemon" "$@" 9>&-
    done
    if [ "$(readlink "$bin/edgectl")" = "$prefix/current/bin/edgectl" ]; then
        say "removing $bin/edgectl"
        rm -f "$bin/edgectl"
    fi
    say "removing $prefix"
    remove_versions "$prefix"/versions/*
    rm -rf "$prefix/versions" "$prefix/current" "$prefix/current.new" "$prefix/.in-use"
    [ "$bin" != "$prefix/bin" ] || rmdir "$bin" 2>/dev/null || true
    rm -f "$marker"
    rmdir "$prefix" 2>/dev/null || say "$prefix stays: it has files that are not of this script"
    # A machine that joined by the site's line fetched its files there.
    rmdir "${XDG_CACHE_HOME:-$HOME/.cache}/edgeshard" /var/cache/edgeshard 2>/dev/null || true
}

state_of_user() {
    echo "${XDG_CONFIG_HOME:-$HOME/.config}/edgeshard"
    echo "${XDG_STATE_HOME:-$HOME/.local/state}/edgeshard"
    echo "${XDG_CACHE_HOME:-$HOME/.cache}/edgeshard"
    ! is_root || printf '%s\n' /etc/edgeshard /var/lib/edgeshard-agent /var/lib/edgeshard-coordinator \
        /var/cache/edgeshard
}

purge() {
    for record in /etc/edgeshard/*.installed.json; do
        ! is_root || [ ! -e "$record" ] || grep -q "\"$prefix/" "$record" ||
            fail "$record is of another installation: remove it there, by edgectl uninstall"
    done
    state=$(state_of_user | while read -r path; do [ ! -e "$path" ] || echo "$path"; done)
    if [ -z "$yes" ]; then
        say "this removes EdgeShard and all of its state:" "$prefix" $state
        printf 'Type yes to go on: '
        read -r answer || answer=no
        [ "$answer" = yes ] || fail "nothing was removed"
    fi
    remove --purge
    printf '%s\n' "$state" | while read -r path; do
        [ -n "$path" ] || continue
        say "removing $path"
        rm -rf "$path"
        remove_empty_above "$path"
    done
    remove_empty_above "$prefix"
    remove_empty_above "$bin/edgectl"
    ! is_root || remove_leftovers
}

# As far as this user's home.
remove_empty_above() {
    above=$(dirname "$1")
    while case $above in "$HOME"/?*) rmdir "$above" 2>/dev/null ;; *) false ;; esac do
        above=$(dirname "$above")
    done
}

# A service that was changed by hand, or whose programs went first, left these.
remove_leftovers() {
    for daemon in edgeshard-agent edgeshard-coordinator; do
        rm -f "/etc/sysusers.d/$daemon.conf" "/etc/systemd/system/$daemon.service"
        ! id "$daemon" >/dev/null 2>&1 || userdel "$daemon"
    done
}

main() {
    read_arguments "$@"
    while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done
    [ $# -eq 0 ] || shift
    case $action in
        back) back ;;
        remove) remove ;;
        purge) purge ;;
        install)
            install
            say "EdgeShard $version is installed: edgectl --help"
            [ -z "$token" ] || exec "$bin/edgectl" join "$token" "$@" 9>&-
            ;;
    esac
}

main "$@"
exit
