#!/bin/sh
# Trains a model: ./run_train.sh [--config NAME_OR_PATH] [--section.key VALUE]...   (--help lists every key)
# Runs from any folder and through a symbolic link. PYTHON names another interpreter than the first python3 of PATH.
set -eu

script=$0
while [ -L "$script" ]; do
    target=$(readlink "$script")
    case $target in
    /*) script=$target ;;
    *) script=$(dirname -- "$script")/$target ;;
    esac
done
root=$(CDPATH='' cd -- "$(dirname -- "$script")" && pwd -P)

python=${PYTHON:-$(command -v python3 || command -v python || echo python3)}
if ! command -v "$python" >/dev/null; then
    echo "error: no Python interpreter $python: install Python 3.10 or newer, or name one in PYTHON" >&2
    exit 2
fi

# Code on the command line, and this repository as the first place of imports: a working directory with packages named
# like ours must not shadow them.
exec "$python" -c '
import os, sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
import signal
# A request to stop waits until the launcher can hear it.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
if sys.version_info < (3, 10):
    sys.stderr.write("error: %s is Python %d.%d, 3.10 is needed: name another in PYTHON\n"
                     % (sys.executable, *sys.version_info[:2]))
    sys.exit(2)
from dmuon_titan.launch import main
status = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)  # with exactly this status, whatever signal comes now
' "$root" "$@"
