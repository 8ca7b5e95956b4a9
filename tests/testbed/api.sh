#!/bin/bash
# SkyPilot's API server of the testbed, in a process group of its own: api.sh start | kill
# `kill` is kill -9 of the server and all its workers; what a client has started in its place ends too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
pid=$TB_DIR/pids/api-server
health=http://127.0.0.1:$TB_API_PORT/api/health

case ${1:-} in
  start)
    ! alive "$pid" || exit 0
    (client_env; export TB_MARK=$TB_DIR; cd "$HOME"; exec setsid sky api start --foreground --port "$TB_API_PORT") \
      </dev/null >>"$TB_DIR/log/api-server.log" 2>&1 &
    record "$pid" $!
    for _ in $(seq 300); do
      ! curl -fsS -m 5 "$health" >/dev/null 2>&1 || exit 0
      alive "$pid" || break
      sleep 0.2
    done
    tail -n 20 "$TB_DIR/log/api-server.log" >&2
    fail "SkyPilot's API server did not come up"
    ;;
  kill)
    if alive "$pid"; then kill -KILL -- "-$(pid_of "$pid")" 2>/dev/null || true; fi
    rm -f "$pid"
    for stray in $(stray_servers); do kill -KILL -- "-$stray" 2>/dev/null || true; done   # first of its process group
    ;;
  *) fail "api.sh start|kill" ;;
esac
