"""A local HTTP server that answers chats as vLLM does, by a rule: the same messages always get the same tokens."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

VOCAB_SIZE, EOS = 1000, 2


class FakeChat(ThreadingHTTPServer):
    """Counts a word as a token.

    Attributes:
        requests: Bodies of all chat requests, refused ones included.
        status: Status of the n-th chat request (from 0); anything but 200 makes the server fail.
        release: While cleared, requests from number ``hold_from`` on wait for it.
        strict: Refuse a prompt whose max_tokens do not fit, as vLLM did before it lowered them by itself.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, max_model_len: int = 400, strict: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.max_model_len, self.strict = max_model_len, strict
        self.requests: list[dict[str, Any]] = []
        self.status: Callable[[int], int] = lambda number: 200
        self.hold_from = 10**9
        self.release = Event()
        self.vocab_offset = 0
        self.lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def asked(self) -> list[str]:
        """The last user message of each request."""
        return [request["messages"][-1]["content"] for request in self.requests]

    def answer(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        messages = request["messages"]
        prompt = [1] + [_token(word) for m in messages for word in (m["role"], *m["content"].split())]
        room = self.max_model_len - len(prompt)
        if room < 0 or (self.strict and request.get("max_tokens", 0) > room):
            return 400, _error(f"This model's maximum context length is {self.max_model_len} tokens. However, ...")
        if room == 0:
            return 400, _error("max_tokens must be at least 1, got 0.")
        tokens = generate(messages, request.get("seed") if request["temperature"] else None)
        limit = min(room, request.get("max_tokens", room))
        finish_reason = "stop" if len(tokens) <= limit else "length"
        tokens = [token + self.vocab_offset for token in tokens[:limit]]
        text = " ".join(f"w{token}" for token in tokens if token != EOS)
        choice = {
            "message": {"role": "assistant", "content": text},
            "token_ids": tokens,
            "finish_reason": finish_reason,
        }
        return 200, {"prompt_token_ids": prompt, "choices": [{"index": 0, **choice}]}


def generate(messages: list[dict[str, str]], seed: int | None) -> list[int]:
    """8 to 32 tokens, the last one EOS."""
    digest = hashlib.sha256(json.dumps([messages, seed]).encode()).digest()
    return [3 + byte + 7 * i for i, byte in enumerate(digest[: 7 + digest[0] % 25])] + [EOS]


def _token(word: str) -> int:
    return 3 + int(hashlib.sha256(word.encode()).hexdigest()[:6], 16) % (VOCAB_SIZE - 3)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "code": 400}}


class _Handler(BaseHTTPRequestHandler):
    server: FakeChat

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "verifier"}]})

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.requests)
            server.requests.append(request)
        if number >= server.hold_from:
            server.release.wait(600)
        # Answers come in another order than the requests.
        time.sleep(0.002 * (number % 3))
        status = server.status(number)
        self._send(*(server.answer(request) if status == 200 else (status, _error("made to fail"))))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            """The client was killed."""

    def log_message(self, *_: Any) -> None:
        """Silence."""


@contextmanager
def fake_chat(max_model_len: int = 400, strict: bool = False) -> Iterator[FakeChat]:
    """Run a fake server in a thread."""
    server = FakeChat(max_model_len, strict)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
