"""`python -m common.process.probe [PATH]`: asks this container's own admin port, for the health checks of images.

Promises: exit code 0 exactly when the answer is 200, within a few seconds either way. By hand and not by curl, which
          slim images lack; without proxies, which the environment may name for everything else.
"""

import http.client
import os
import sys

# As in the settings, which the check must not load: it runs every few seconds.
PORT = 9090
# Less than the health check's own limit, so that the reason is told.
TIMEOUT_S = 4.0


def main() -> int:
    """Ask for the path (`/livez` by default) on the port that the service itself was given."""
    path = sys.argv[1] if len(sys.argv) > 1 else "/livez"
    port = int(os.environ.get("TOWLINE_ADMIN_PORT") or PORT)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"{path} on port {port}: {error}", file=sys.stderr)
        return 1
    print(f"{path} on port {port}: {status}")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
