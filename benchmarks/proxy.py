"""A TCP proxy whose connections can be cut and whose requests can be watched: a network that fails on demand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

HOST = "127.0.0.1"


class Proxy:
    """Forwards connections to a port of this machine.

    Args:
        port: where to.

    Attributes:
        watch: called with what a client sends, after it was forwarded.
        url: of the proxy.
    """

    def __init__(self, port: int) -> None:
        self.watch: Callable[[bytes], object] = lambda request: None
        self._to, self._open, self._lock = port, set[socket.socket](), threading.Lock()
        self._listener = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> int:
        """Cut all connections; how many they were."""
        with self._lock:
            cut, self._open = self._open, set()
        for client in cut:
            _shut(client)
        return len(cut)

    def close(self) -> None:
        """Accept nothing more, and cut what is open."""
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        with suppress(OSError):  # when it is closed
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    self._open.add(client)
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        # nobody may listen there
        with suppress(OSError), client, socket.create_connection((HOST, self._to)) as server:
            back = threading.Thread(target=_pump, args=(server, client, lambda data: None), daemon=True)
            back.start()
            _pump(client, server, lambda data: self.watch(data))
            back.join()
        with self._lock:
            self._open.discard(client)


def _pump(source: socket.socket, sink: socket.socket, seen: Callable[[bytes], object]) -> None:
    """Forward until one end is closed, then close both, as a server that dies does."""
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
            seen(data)
    _shut(source)
    _shut(sink)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
