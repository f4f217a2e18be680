"""Lamina's server and engine process as they are, with a model that takes no time: `python bench/instant_server.py MODEL_DIR`.

Listens on a free port of this machine and writes `ready: http://127.0.0.1:PORT PID_OF_ENGINE`.
"""

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

_ENGINE = Path(__file__).resolve().parent.parent / "tests" / "engine" / "fake_engine.py"


def main(directory: Path) -> None:
    """Serves until it is ended."""
    listener = listen(ServerSettings(port=0))
    port = listener.getsockname()[1]
    client = EngineClient(EngineConfig(str(directory), cache_bytes="1GiB"), [sys.executable, str(_ENGINE)])
    chat = find_chat_format(directory, None, None)
    state = ServerState(ServerSettings(port=port, names=("tiny",)), client, load_codec(directory), chat)

    def on_ready(ready: Ready) -> None:
        print(f"ready: http://127.0.0.1:{port} {ready.pid}", flush=True)

    asyncio.run(serve(state, listener, lambda _: None, on_ready))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
