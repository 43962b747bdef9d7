#!/bin/bash
# Makes the project's environments. Sourced by the other scripts:
#   rdmakit_env MPI [GROUP...]   make or reuse the environment of one MPI family (openmpi, mpich)
#                                with dependency groups of pyproject.toml; sets RDMAKIT_BIN to its bin
# Run directly, it makes the one that RDMAKIT_MPI names and prints that bin: scripts/env.sh [GROUP...]
#
#   RDMAKIT_MPI    openmpi (default) or mpich
#   RDMAKIT_VENV   where; default .venv here for Open MPI, .venv-mpich for MPICH
#   RDMAKIT_EXTRA  which UCX and array packages: cpu (default), cuda12 or cuda13
#   PYTHON         the Python to make it with; default: the first of python3, python3.14 .. 3.11 that fits
set -eu
RDMAKIT_ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

rdmakit_say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
rdmakit_die() { rdmakit_say "$@"; exit 1; }

# -I -S: no site packages, so that nothing a user has set up can slow or change the answer.
rdmakit_python_version() {
  "$1" -I -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

rdmakit_find_python() { # sets py and py_version
  local candidates candidate version found=
  if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
  else
    candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  fi
  for candidate in "${candidates[@]}"; do
    py=$(command -v "$candidate") || continue
    # A name can be there and not run (version managers leave such stubs).
    version=$(rdmakit_python_version "$py") || continue
    case $version in
      3.1[1-9] | 3.[2-9][0-9]) py_version=$version; return ;;
      *) found+="${found:+, }$py is $version" ;;
    esac
  done
  rdmakit_die "Python 3.11 or newer is needed; found: ${found:-none}." \
    "Install one, or name it: PYTHON=/path/to/python3 $0"
}

# What an environment is made from. A stamp with other words is another environment.
rdmakit_describe() { # MPI PYTHON_VERSION
  local sum
  sum=$(sha256sum <"$RDMAKIT_ROOT/pyproject.toml")
  # The paths: scripts in a venv, and the link to these sources, hold absolute ones.
  printf '%s %s %s %s\n%s\n%s\n' "$1" "$rdmakit_extra" "$2" "${sum%% *}" "$RDMAKIT_ROOT" "$venv"
}

rdmakit_is_ready() { # MPI GROUP...
  local version stamp group
  stamp=$(cat -- "$venv/.rdmakit-stamp" 2>/dev/null) || return 1
  version=$(rdmakit_python_version "$venv/bin/python") || return 1
  if [ -n "${PYTHON:-}" ]; then # a Python named on purpose is not overruled by what is there
    [ "$(rdmakit_python_version "$PYTHON")" = "$version" ] || return 1
  fi
  [[ $stamp$'\n' == "$(rdmakit_describe "$1" "$version")"$'\n'* ]] || return 1
  shift
  for group; do [[ $stamp$'\n' == *$'\n'"group $group"$'\n'* ]] || return 1; done
}

rdmakit_pip() { # pip ARGS... for the environment, whatever is left of its own pip
  # The user's settings for a pip of their own would lead packages elsewhere.
  unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV PYTHONPATH PYTHONHOME
  export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
  if "$venv/bin/python" -I -c 'import pip' 2>/dev/null; then
    "$venv/bin/python" -I -m pip "$@"
  else
    "$py" -m pip --python "$venv/bin/python" "$@"
  fi
}

rdmakit_make_empty() { # a venv with no packages, where python3-venv is missing too
  local pip_version
  find "$venv" -mindepth 1 -maxdepth 1 ! -name .rdmakit-lock -exec rm -rf {} +
  if "$py" -I -c 'import ensurepip; ensurepip.version()' >/dev/null 2>&1 &&
    "$py" -I -m venv "$venv" >/dev/null 2>&1; then
    return
  fi
  pip_version=$("$py" -m pip --version 2>/dev/null | sed -n 's/^pip \([0-9]*\.[0-9]*\).*/\1/p') || true
  # --python came with 22.3
  case $pip_version in
    22.[3-9] | 22.[1-9][0-9] | 2[3-9].* | [3-9][0-9].*) ;;
    *) rdmakit_die "$py has no ensurepip, and its pip is ${pip_version:-missing} where 22.3 is" \
         "needed: install pip (Debian and Ubuntu: python3-venv or python3-pip)" ;;
  esac
  find "$venv" -mindepth 1 -maxdepth 1 ! -name .rdmakit-lock -exec rm -rf {} +
  "$py" -I -m venv --without-pip "$venv" || rdmakit_die "$py -m venv failed"
  rdmakit_pip install --quiet pip || rdmakit_die "pip could not be installed into $venv"
}

rdmakit_make() { # MPI GROUP...
  local mpi=$1 described group requirements=() line
  shift
  rdmakit_find_python
  described=$(rdmakit_describe "$mpi" "$py_version")
  local old
  old=$(cat -- "$venv/.rdmakit-stamp" 2>/dev/null) || true
  rm -f "$venv/.rdmakit-stamp" # from here to the new stamp it counts as half made
  # Only what pyproject.toml says may have changed: then packages are brought up to date in place.
  if [ "${old%% "$py_version "*}" = "${described%% "$py_version "*}" ] &&
    [[ $old$'\n' == *$'\n'"$RDMAKIT_ROOT"$'\n'"$venv"$'\n'* ]] &&
    [ "$(rdmakit_python_version "$venv/bin/python")" = "$py_version" ]; then
    # Groups already there stay wanted, or two scripts in turn would install for ever.
    while read -r line; do
      [[ $line != "group "* || " $* " == *" ${line#group } "* ]] || set -- "$@" "${line#group }"
    done <<<"$old"
    rdmakit_say "bringing $venv up to date from PyPI${*:+ (with: $*)}"
  else
    rdmakit_say "making $venv with $py ($py_version), $mpi, UCX and NumPy${*:+, and for: $*};" \
      "downloads about $(rdmakit_megabytes "$mpi" "$@") MB from PyPI, once"
    rdmakit_make_empty
  fi
  # Read here, since pip knows --group only from 25.1 on.
  for group; do
    while IFS= read -r line; do requirements+=("$line"); done < <(
      "$venv/bin/python" -I -c 'import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["dependency-groups"][sys.argv[2]], sep="\n")' \
        "$RDMAKIT_ROOT/pyproject.toml" "$group")
    [ "${#requirements[@]}" -gt 0 ] || rdmakit_die "pyproject.toml has no dependency group $group"
  done
  local start=$SECONDS
  # Editable: a changed source is the one that runs. In its folder, so that a space in the
  # path does not reach pip's parser of requirements.
  (cd "$RDMAKIT_ROOT" && rdmakit_pip install --quiet \
    --editable ".[$rdmakit_extra,$mpi]" ${requirements[@]+"${requirements[@]}"}) ||
    rdmakit_die "pip could not install the packages (its own message is above); nothing is left half" \
      "made: call again when the cause is gone"
  {
    printf '%s\n' "$described"
    for group; do printf 'group %s\n' "$group"; done
  } >"$venv/.rdmakit-stamp.new"
  mv "$venv/.rdmakit-stamp.new" "$venv/.rdmakit-stamp" # whole or not there
  rdmakit_say "$venv is ready after $((SECONDS - start)) s"
}

rdmakit_megabytes() { # MPI GROUP...
  local sum=90
  [ "$1" = openmpi ] || sum=97
  [ "$rdmakit_extra" = cpu ] || sum=$((sum + 120))
  shift
  for group; do
    case $group in test) sum=$((sum + 13)) ;; check) sum=$((sum + 30)) ;; esac
  done
  echo "$sum"
}

rdmakit_env() { # MPI GROUP...
  local venv mpi=$1 rdmakit_extra=${RDMAKIT_EXTRA:-cpu} py='' py_version=''
  case $mpi in
    openmpi) venv=$RDMAKIT_ROOT/.venv ;;
    mpich) venv=$RDMAKIT_ROOT/.venv-mpich ;;
    *) rdmakit_die "RDMAKIT_MPI is '$mpi'; openmpi or mpich is expected" ;;
  esac
  case $rdmakit_extra in
    cpu | cuda12 | cuda13) ;;
    *) rdmakit_die "RDMAKIT_EXTRA is '$rdmakit_extra'; cpu, cuda12 or cuda13 is expected" ;;
  esac
  # The named place is for the family that was asked for; a second one stands beside it.
  if [ -n "${RDMAKIT_VENV:-}" ]; then
    venv=$(realpath -m -- "$RDMAKIT_VENV")
    [ "$mpi" = "${RDMAKIT_MPI:-openmpi}" ] || venv+=-$mpi
  fi
  shift
  RDMAKIT_BIN=$venv/bin
  if rdmakit_is_ready "$mpi" "$@"; then return; fi
  # What is not ours is never emptied.
  if [ -e "$venv" ] && ! [ -e "$venv/.rdmakit-lock" ] && [ -n "$(ls -A -- "$venv" 2>&1)" ]; then
    rdmakit_die "$venv exists and is not an environment made here: remove it, or set RDMAKIT_VENV"
  fi
  { mkdir -p -- "$venv" && true >>"$venv/.rdmakit-lock"; } 2>/dev/null ||
    rdmakit_die "cannot write $venv: set RDMAKIT_VENV to a place that you can write"
  (
    if ! flock --nonblock 9; then
      rdmakit_say "another call is making $venv; waiting for it"
      flock 9
    fi
    rdmakit_is_ready "$mpi" "$@" || rdmakit_make "$mpi" "$@"
  ) 9>>"$venv/.rdmakit-lock"
}

# What Open MPI 5 refuses or does badly on a small machine; a value already set stays. (Not for a
# run over several hosts: with :oversubscribe it puts all ranks on the first.)
rdmakit_openmpi_settings() {
  if [ "$(id -u)" = 0 ]; then # in a container root is often the only user there is
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  # More ranks than cores.
  export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}
  # A rank tied to one core would have its helper threads there too.
  export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy-none}
  # A waiting rank gives its core to the one it waits for. Open MPI does so where it sees that
  # cores are shared; under a container's CPU quota it does not see: 19 ms a step in place of 20 us.
  export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle-1}
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  rdmakit_env "${RDMAKIT_MPI:-openmpi}" "$@"
  printf '%s\n' "$RDMAKIT_BIN"
fi
