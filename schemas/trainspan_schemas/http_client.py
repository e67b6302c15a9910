"""HTTP to trainspan's own machines: never through a proxy, and never on to where an answer redirects."""

import urllib.request
from typing import Any, Final

__all__ = ["OPENER"]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Raises the HTTPError of a redirect: urllib would send the token in `Authorization` to the other host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
"""`OPENER.open(request, timeout=…)` raises what `urllib.request.urlopen` raises."""
