"""Lamina's server over a model that writes what it is told: `python scripted_server.py MODEL_DIR --script FILE --port PORT`.

All but the model is real: HTTP, the engine's process, grammars. A request's `seed` says which answer of the file it gets; see
tests/engine/fake_engine.py.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from lamina.base.config import EngineConfig
from lamina.engine.client import EngineClient
from lamina.engine.text import load_codec
from lamina.engine.wire import Ready
from lamina.models.chats import find_chat_format
from lamina.server.run import listen, serve
from lamina.server.settings import ServerSettings
from lamina.server.state import ServerState

_ENGINE = Path(__file__).resolve().parent.parent / "engine" / "fake_engine.py"


def main(directory: Path, script: Path, port: int) -> None:
    """Serves until it is ended."""
    listener = listen(ServerSettings(port=port))
    port = listener.getsockname()[1]
    command = [sys.executable, str(_ENGINE), "--script", str(script)]
    client = EngineClient(EngineConfig(str(directory), cache_bytes="64MiB"), command)
    chat = find_chat_format(directory)
    state = ServerState(ServerSettings(port=port, names=("tiny",)), client, load_codec(directory), chat)

    def on_ready(ready: Ready) -> None:
        print(f"ready: http://127.0.0.1:{port}", flush=True)

    asyncio.run(serve(state, listener, lambda _: None, on_ready))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    main(args.directory, args.script, args.port)
