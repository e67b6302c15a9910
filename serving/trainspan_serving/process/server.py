"""The server process, started by the supervisor only: `python -m trainspan_serving.process.server VLLM-FLAGS…`."""

import logging
import os
import sys

from trainspan_serving.process.link import follow_supervisor

__all__ = ["main"]


def main() -> None:
    """Runs vLLM's OpenAI server in this process until a signal."""
    logging.basicConfig(
        level=os.environ.get("TRAINSPAN_LOG", "WARNING").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    follow_supervisor()
    sys.argv[0] = "trainspan serve"
    # The console command of the CPU build fails on a missing distribution; its entry point does not.
    from vllm.entrypoints.launchers.api_server import entry

    entry.main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
