"""`python -m pipelines.engine.host ENGINE_DIR --port P`: serve one engine until SIGTERM, on loopback by default."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.errors import EnvironmentProblem, QuantgateError

if TYPE_CHECKING:
    from pipelines.engine.host.desk import Desk
    from pipelines.engine.host.engine import Engine

HOST = "127.0.0.1"


def main(argv: list[str] | None = None) -> int:
    """Serve; give the exit code."""
    options = _parser().parse_args(argv)
    try:
        with _listen(options.host, options.port) as listener:
            return _serve(options, listener)
    except QuantgateError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipelines.engine.host", description=__doc__)
    parser.add_argument("engine_dir", type=Path, metavar="ENGINE_DIR")
    parser.add_argument("--host", default=HOST, help="address to listen on; there is no authentication here")
    parser.add_argument("--port", type=int, default=8000, help="TCP port; 0 takes any free one")
    parser.add_argument("--threads", type=_positive, default=os.cpu_count() or 1, help="threads for the model")
    parser.add_argument("--max-batch", type=_positive, default=4, help="sequences decoded together")
    parser.add_argument("--max-queue", type=int, default=256, help="requests that may wait besides; more get a 429")
    parser.add_argument("--spin", action="store_true", help="let model threads spin: faster on an idle machine")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be 1 or more")
    return value


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise EnvironmentProblem(f"--port={port}: taken by another process on {host}; choose another") from None
        raise EnvironmentProblem(f"--host={host} --port={port}: cannot be used: {error.strerror}") from None
    except OverflowError:
        listener.close()
        raise EnvironmentProblem(f"--port={port}: must be from 0 to 65535") from None
    return listener


def _serve(options: argparse.Namespace, listener: socket.socket) -> int:
    import uvicorn

    from pipelines.engine.host.app import Server
    from pipelines.engine.host.engine import Engine
    from pipelines.engine.host.metrics import Metrics

    began = time.monotonic()
    engine = Engine.read(options.engine_dir)
    desk = _desk(engine, options)
    config = uvicorn.Config(
        Server(engine, desk, Metrics()).app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)

    def give_up() -> None:
        server.should_exit = True

    desk.on_death = give_up
    desk.start()
    host, port = listener.getsockname()[:2]
    print(
        f"serving {engine.card.model_id} on http://{host}:{port}/v1 after {time.monotonic() - began:.1f} s", flush=True
    )
    server.run(sockets=[listener])
    died = not desk.alive
    desk.close()
    return 1 if died else 0


def _desk(engine: Engine, options: argparse.Namespace) -> Desk:
    from pipelines.engine.host.batch import BatchDecoder
    from pipelines.engine.host.desk import Desk
    from pipelines.engine.host.graph import Graph

    graph = Graph(options.engine_dir, options.threads, options.spin)
    decoder = BatchDecoder(graph, options.max_batch)
    decoder.warm_up()
    return Desk(decoder, engine.tokenizer, engine.card.eos_token_ids, options.max_batch, options.max_queue)


if __name__ == "__main__":
    sys.exit(main())
