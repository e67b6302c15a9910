"""A container's health check: `probe.py PORT PATH` exits with 0 if the path on this machine answers 200, else with 1.

It tries TLS first, then plain HTTP. The certificate is not checked: it names the service, and the request stays here.
"""

import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def is_healthy(port: str, path: str) -> bool:
    """Whether `http(s)://127.0.0.1:port/path` answers 200 within TIMEOUT_S."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    for scheme in ("https", "http"):
        try:
            with opener.open(f"{scheme}://127.0.0.1:{port}{path}", timeout=TIMEOUT_S / 2) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False
        except (OSError, ValueError):
            continue
    return False


if __name__ == "__main__":
    sys.exit(0 if is_healthy(*sys.argv[1:]) else 1)
