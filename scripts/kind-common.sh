# shellcheck shell=bash
# What scripts/kind-up, kind-smoke and kind-down share: which cluster they mean, and how they speak to it and to you.
#
#   KIND_CLUSTER=towline   name of the cluster that they make and remove
#   KUBECTL='kubectl ...'  how to reach the cluster; by default the context of that name
#
# For a cluster that was not made by `kind create cluster`, such as a shared one for tests:
#
#   KIND_LOAD=command      puts the images named by its arguments into that cluster; then none is made or removed
#   KIND_FILTER=command    manifests go through it before they are applied: for servers that lack newer API versions

cluster=${KIND_CLUSTER:-towline}
kubectl=${KUBECTL:-kubectl --context "kind-$cluster"}
namespace=towline
key_file=.towline/$cluster.key # is ignored by git
began=$SECONDS

say() { printf '%5d s  %s\n' $((SECONDS - began)) "$*"; }

fail() {
  printf '%s: %s\n' "${0##*/}" "$1" >&2
  shift
  [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
  exit 1
}

need() { command -v "$1" >/dev/null || fail "there is no $1 on the PATH" "$2"; }

# shellcheck disable=SC2086 # a command with its options
kube() { $kubectl --namespace "$namespace" "$@"; }

# Says which container engine kind is to use; it takes the same variable.
pick_engine() {
  if [ -n "${KIND_EXPERIMENTAL_PROVIDER:-}" ]; then
    engine=$KIND_EXPERIMENTAL_PROVIDER
  elif docker info >/dev/null 2>&1; then
    engine=docker
  elif podman info >/dev/null 2>&1; then
    engine=podman
  else
    fail 'neither docker nor podman answers' 'start Docker, or install one of them'
  fi
  export KIND_EXPERIMENTAL_PROVIDER=$engine
}

# Applies manifests from standard input.
# shellcheck disable=SC2086
apply() { ${KIND_FILTER:-cat} | kube apply -f -; }

need_key() {
  [ -s "$key_file" ] || fail "there is no API key in $key_file" 'make kind-up makes one'
}

# Runs a command in the stand-ins' pod, which has Python, the harness and `towline`, as whoever holds the API key.
in_stand_in() {
  kube exec -i deploy/stand-in -- env TOWLINE_API_KEY="$(cat "$key_file")" TOWLINE_URL=http://gateway:8080 \
    TOWLINE_BRIDGE_URL=ws://worker:8081 SMOKE_AGENT_URL=http://stand-in:9100 SMOKE_MODEL_URL=http://stand-in:9101/v1 "$@"
}

# Passes lines on; fails unless the last one ends in this. `kubectl exec` ends with 0 when it merely lost its pod.
# Not by awk: some buffer what they read, and long work would show nothing.
ends_with() {
  local line last=
  while IFS= read -r line; do
    printf '%s\n' "$line"
    last=$line
  done
  case $last in *"$1") ;; *) echo '(cut off)'; return 1 ;; esac
}

towline() { in_stand_in towline "$@" </dev/null; }

# Reads a member of a JSON object from standard input; further names go deeper into it. Text comes without its quotes.
member() {
  python3 -c '
import json, sys
value = json.load(sys.stdin)
for name in sys.argv[1:]:
    value = value[name]
print(value if isinstance(value, str) else json.dumps(value))' "$@"
}

# wait_until SECONDS WHAT COMMAND...: tries the command every half second; fails if it does not succeed in time.
wait_until() {
  local until=$((SECONDS + $1)) what=$2
  shift 2
  while ! "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $until ] || fail "waited in vain for: $what" "look at: $kubectl --namespace $namespace get pods"
    sleep 0.5
  done
}
