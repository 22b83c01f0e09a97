#!/bin/sh
# The credentials of this installation, each in a volume of its own.
#
#   credentials.sh api-key            into /var/lib/towline/api-key: every scope, every user
#   credentials.sh machine-token      into /var/lib/towline/token: the machine of the user ada; needs /operator/api-key
#   credentials.sh run COMMAND...     the command, with that API key in its environment
#
# Promises: what is there and still good is kept; what the gateway does not know any more (another database) is made
#           anew. Files are readable by their owner alone, and whole or not there. A gateway that does not answer is
#           waited for.
set -eu
umask 077
home=/var/lib/towline
user=ada
WAIT_S=180

with_key() { TOWLINE_API_KEY=$(cat "$1") && export TOWLINE_API_KEY; }

# Runs a command of towline, again while nobody answers (exit code 4). Returns its exit code.
ask() {
  until=$(($(date +%s) + WAIT_S))
  while :; do
    code=0
    towline "$@" || code=$?
    [ $code -eq 4 ] && [ "$(date +%s)" -lt $until ] || return $code
    sleep 1
  done
}

# Whether the gateway takes the API key in the environment. It refuses with 3; all else ends the script.
is_taken() {
  code=0
  ask tokens list $user >/dev/null || code=$?
  case $code in 0) ;; 3) return 1 ;; *) exit $code ;; esac
}

case $1 in
api-key)
  if [ -s $home/api-key ] && with_key $home/api-key && is_taken; then
    echo "the API key is kept"
    exit
  fi
  ask keys create --name compose --scope jobs --scope runs --scope threads --scope admin >$home/api-key.new
  mv $home/api-key.new $home/api-key
  ;;
machine-token)
  with_key /operator/api-key
  ask tokens list $user --json >/tmp/tokens
  if [ -s $home/token ] && grep -F "$(cat $home/token-id)" /tmp/tokens | grep -q '"revoked_at":null'; then
    echo "the machine token of $user is kept"
    exit
  fi
  # The id goes first: a token without one is made anew.
  towline tokens create $user --name laptop --json >/tmp/token
  sed -n 's/.*"token_id":"\([^"]*\)".*/\1/p' /tmp/token >$home/token-id
  sed -n 's/.*"token":"\([^"]*\)".*/\1/p' /tmp/token >$home/token.new
  mv $home/token.new $home/token
  echo "made a machine token of $user"
  ;;
run)
  shift
  with_key /operator/api-key
  exec "$@"
  ;;
esac
