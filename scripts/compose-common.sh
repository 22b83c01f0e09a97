# shellcheck shell=bash
# What scripts/compose-up, compose-smoke and compose-down share: where the files are, and how they speak to Compose and
# to you. Which files: COMPOSE_FILE in deploy/compose/.env, see .env.example there.
#
#   COMPOSE='docker-compose'   another command; by default `docker compose`, or `docker-compose` where only that is there

directory=deploy/compose
began=$SECONDS

say() { printf '%5d s  %s\n' $((SECONDS - began)) "$*"; }

fail() {
  printf '%s: %s\n' "${0##*/}" "$1" >&2
  shift
  [ $# -eq 0 ] || printf '%s\n' "$@" | sed 's/^/  /' >&2
  exit 1
}

# Sets `compose`. The files use `!override` and optional env_files, which came with 2.24.
pick_compose() {
  if [ -n "${COMPOSE:-}" ]; then
    compose=$COMPOSE
  elif docker compose version >/dev/null 2>&1; then
    compose='docker compose'
  elif command -v docker-compose >/dev/null; then
    compose=docker-compose
  else
    fail 'there is no Docker Compose' 'https://docs.docker.com/compose/install/'
  fi
  local version major minor
  version=$($compose version --short) || fail "\`$compose version\` does not work"
  version=${version#v}
  major=${version%%.*} minor=${version#*.} minor=${minor%%.*}
  [ "$major" -gt 2 ] || { [ "$major" -eq 2 ] && [ "$minor" -ge 24 ]; } ||
    fail "Docker Compose 2.24 or newer is needed, and \`$compose\` is $version" 'https://docs.docker.com/compose/install/'
  docker info >/dev/null 2>&1 || fail 'the Docker daemon does not answer' 'start it; "docker info" says what is wrong'
}

# shellcheck disable=SC2086 # a command with its options
compose() { (cd "$directory" && $compose "$@"); }

# Prints a variable as Compose has it: from the environment, else from .env, else by its default.
variable() {
  local value=${!1:-}
  [ -n "$value" ] || value=$(sed -n "s/^$1=//p" "$directory/.env" | tail -n 1)
  echo "${value:-$2}"
}

is_public() { case $(variable COMPOSE_FILE '') in *public.yaml*) ;; *) return 1 ;; esac; }
