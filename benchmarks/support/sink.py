"""A collector that only counts, in a separate process, so that only the sender is measured.

`python -m benchmarks.support.sink` prints its port, then for each line on stdin `REQUESTS BYTES` so far.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc


def main() -> None:
    """Serves until stdin ends."""
    counts = [0, 0]

    def export(request: bytes, _context: Any) -> bytes:
        counts[0] += 1
        counts[1] += len(request)
        return b""

    handler = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.server(ThreadPoolExecutor(2))
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    for _ in sys.stdin:
        print(*counts, flush=True)
    server.stop(0)


if __name__ == "__main__":
    main()
