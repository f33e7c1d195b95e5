"""A web server on loopback that speaks TLS and wants a key: the far side of a proxied secret.

Called by the tests of proxied secrets. By path it says: `/echo` the request's head; `/repeat` the body, as it is or,
asked for, reversed; `/back` the authorization in the form that `?as=` names; `/slow` server-sent events, one for each
tick; `/bytes/N`; `/go` a redirect; `/packed` a compressed answer; `/v1/chat/completions` and `/v1/messages` models that
count their tokens; the rest: files, for who brings a key.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from broker.egress.certs import Authority
from broker.egress.tls import server_context

__all__ = ["Asked", "TlsWeb", "tls_web"]

BLOCK = bytes(range(256)) * 1024
#: What the model has an agent do; the last one ends mini-swe-agent.
STEPS = ("pwd; ls", 'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo "the model\'s last word"')


class Asked:
    """One request as it came."""

    def __init__(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body

    def header(self, name: str) -> list[str]:
        """Return all values of a header."""
        return [value for key, value in self.headers if key.lower() == name]


class TlsWeb:
    """A running server. ``ca`` is the file that its clients have to trust."""

    def __init__(self, folder: Path, files: Path | None, names: str) -> None:
        authority = Authority(os.urandom(32), int(time.time()))
        self.ca = folder / "upstream-ca.pem"
        self.ca.write_text(authority.pem)
        self.asked: list[Asked] = []
        #: What the models took, one for each answer: tokens in and out.
        self.tokens: list[tuple[int, int]] = []
        #: One for each request to /slow: an event is sent at each release.
        self.ticks: list[threading.Semaphore] = []
        web = self

        class Handler(_Handler):
            server_web = web

            def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - the base class's own
                super().__init__(*arguments, directory=str(files or folder))

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=True)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that leave are no news
        context = server_context(authority, names)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port: int = self._server.server_address[1]
        self.thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def last(self) -> Asked:
        """The last request."""
        return self.asked[-1]

    def stop(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self.thread.join()


@contextmanager
def tls_web(folder: Path, files: Path | None = None, name: str = "127.0.0.1") -> Iterator[TlsWeb]:
    """Yield a server whose certificate is for ``name``."""
    web = TlsWeb(folder, files, name)
    web.thread.start()
    try:
        yield web
    finally:
        web.stop()


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_web: TlsWeb
    timeout = 20
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - the base class's own
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer by path."""
        self._keep(b"")
        parts = urllib.parse.urlsplit(self.path)
        asked = dict(urllib.parse.parse_qsl(parts.query))
        if parts.path == "/echo":
            self._say(str(self.headers).encode())
        elif parts.path == "/back":
            self._back(asked)
        elif parts.path == "/slow":
            self._slow()
        elif parts.path.startswith("/bytes/"):
            self._bytes(int(parts.path.rpartition("/")[2]))
        elif parts.path == "/go":
            self._say(b"", {"Location": f"https://elsewhere.example/?k={self.headers.get('authorization')}"}, 302)
        elif parts.path == "/packed":
            self._say(gzip.compress(str(self.headers).encode()), {"Content-Encoding": "gzip"})
        elif self.headers.get("authorization"):
            super().do_GET()
        else:
            self._say(b"no key", {"WWW-Authenticate": "Basic"}, 401)

    def do_POST(self) -> None:
        """Answer as an echo or a model."""
        size = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(size)
        self._keep(body)
        if self.path == "/repeat":
            text = body.decode()
            self._say((text[::-1] if "reversed" in text else text).encode())
        elif self.path.endswith("/chat/completions"):
            self._model(json.loads(body))
        elif self.path.endswith("/messages"):
            self._messages(json.loads(body))
        else:
            self._say(str(len(body)).encode())

    def do_TRACE(self) -> None:
        """Give the request back."""
        self._keep(b"")
        self._say(str(self.headers).encode())

    def _keep(self, body: bytes) -> None:
        self.server_web.asked.append(Asked(self.command, self.path, list(self.headers.items()), body))

    def _say(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _back(self, asked: dict[str, str]) -> None:
        key = (self.headers.get("authorization") or "").rpartition(" ")[2]
        raw = key.encode()
        forms = {"raw": raw, "base64": base64.b64encode(b"x" + raw), "hex": raw.hex().encode()}
        if asked["as"] == "header":
            self._say(b"see above", {"X-Key": key, "Set-Cookie": f"k={key}"})
        elif asked["as"] == "pieces":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for at in range(0, len(key), 3):
                part = key[at : at + 3].encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._say(b"<" + forms[asked["as"]] + b">")

    def _slow(self) -> None:
        tick = threading.Semaphore(0)
        self.server_web.ticks.append(tick)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(1000):
            if not tick.acquire(timeout=20):
                return
            part = b"data: %d\n\n" % number
            try:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            except OSError:
                return

    def _bytes(self, size: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        while size > 0:
            size -= self.wfile.write(BLOCK[:size])

    def _model(self, asked: dict[str, Any]) -> None:
        turn = sum(message["role"] == "assistant" for message in asked["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "the model's last word"}
        call: dict[str, Any] = {"id": f"call_{turn}", "type": "function"}
        if turn < len(STEPS):
            call["function"] = {"name": "bash", "arguments": json.dumps({"command": STEPS[turn]})}
            message = {"role": "assistant", "content": "a step", "tool_calls": [call]}
        end = "tool_calls" if turn < len(STEPS) else "stop"
        base = {"id": "c-1", "created": 1, "model": asked.get("model")}
        if not asked.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": end}
            answer = {**base, "object": "chat.completion", "choices": [choice], "usage": self._usage(asked)}
            self._say(json.dumps(answer).encode(), {"Content-Type": "application/json"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        counted = bool((asked.get("stream_options") or {}).get("include_usage"))
        streamed = {**message, "tool_calls": [{"index": 0, **call}]} if turn < len(STEPS) else message
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **({"usage": None} if counted else {})}
            for delta, finish in ((streamed, None), ({}, end))
        ]
        usage = self._usage(asked)
        chunks += [{"choices": [], "usage": usage}] if counted else []
        for chunk in chunks:
            text = json.dumps({**base, "object": "chat.completion.chunk", **chunk})
            self.wfile.write(b"data: " + text.encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _messages(self, asked: dict[str, Any]) -> None:
        usage = self._usage(asked)
        told = {"input_tokens": usage["prompt_tokens"] - 5, "cache_read_input_tokens": 3}
        told |= {"cache_creation_input_tokens": 2}
        base = {"id": "m-1", "type": "message", "role": "assistant", "model": asked["model"]}
        text = {"type": "text", "text": 'the model says "usage": {"input_tokens": 0}'}
        if not asked.get("stream"):
            answer = {**base, "content": [text], "usage": {**told, "output_tokens": usage["completion_tokens"]}}
            self._say(json.dumps(answer).encode(), {"Content-Type": "application/json"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {**base, "content": [], "usage": {**told, "output_tokens": 1}}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text["text"]}},
            {"type": "message_delta", "delta": {}, "usage": {"output_tokens": usage["completion_tokens"]}},
            {"type": "message_stop"},
        ]
        for event in events[: asked.get("events")]:
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        self.close_connection = True

    def _usage(self, asked: dict[str, Any]) -> dict[str, int]:
        taken = (10 + len(json.dumps(asked["messages"])), 7 + len(self.server_web.tokens))
        self.server_web.tokens.append(taken)
        return {"prompt_tokens": taken[0], "completion_tokens": taken[1], "total_tokens": sum(taken)}
