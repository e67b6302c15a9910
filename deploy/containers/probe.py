"""A health check: `probe.py PORT PATH [HOST]` exits with 0 if the path answers 200, else with 1. HOST is this machine.

It tries TLS first, then plain HTTP. The certificate is not checked: it names the service, and nothing secret is sent.
"""

import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def is_healthy(port: str, path: str, host: str = "127.0.0.1") -> bool:
    """Whether `http(s)://host:port/path` answers 200 within TIMEOUT_S."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    for scheme in ("https", "http"):
        try:
            with opener.open(f"{scheme}://{host}:{port}{path}", timeout=TIMEOUT_S / 2) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False
        except (OSError, ValueError):
            continue
    return False


if __name__ == "__main__":
    sys.exit(0 if is_healthy(*sys.argv[1:]) else 1)
