"""A local HTTP server that answers as vLLM does, from a rule instead of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

Rule = Callable[[list[int], int], list[int]]


class FakeVllm(ThreadingHTTPServer):
    """Answers completions by ``rule(prompt, max_tokens)`` and keeps the counters that vLLM would keep.

    Every answer of n tokens counts as n // 2 drafts of two tokens, of which the first is accepted each time.
    """

    daemon_threads = True

    def __init__(self, rule: Rule, logprobs: dict[int, float] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rule, self.logprobs = rule, logprobs or {}
        self.refuse: str | None = None
        self.lock = Lock()
        self.requests: list[dict[str, Any]] = []
        self.counters = dict.fromkeys(
            ("drafts", "draft_tokens", "accepted_tokens", "generation", "prompt", "success"), 0
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, prompt: int, generated: int) -> None:
        with self.lock:
            for name, value in (
                ("drafts", generated // 2),
                ("draft_tokens", generated // 2 * 2),
                ("accepted_tokens", generated // 2),
                ("generation", generated),
                ("prompt", prompt),
                ("success", 1),
            ):
                self.counters[name] += value

    def metrics(self) -> str:
        with self.lock:
            c = dict(self.counters)
        label = '{engine="0",model_name="verifier"}'
        rows = {
            f"vllm:spec_decode_num_drafts_total{label}": c["drafts"],
            f"vllm:spec_decode_num_draft_tokens_total{label}": c["draft_tokens"],
            f"vllm:spec_decode_num_accepted_tokens_total{label}": c["accepted_tokens"],
            f"vllm:generation_tokens_total{label}": c["generation"],
            f"vllm:prompt_tokens_total{label}": c["prompt"],
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="verifier"}': c["success"],
            'vllm:request_success_total{engine="0",finished_reason="stop",model_name="verifier"}': 0,
        }
        for position, value in enumerate((c["accepted_tokens"], 0)):
            rows[
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="verifier",position="{position}"}}'
            ] = value
        return "".join(f"{name} {float(value)}\n" for name, value in rows.items())


class _Handler(BaseHTTPRequestHandler):
    server: FakeVllm

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(self.server.metrics().encode(), "text/plain")
        elif self.path == "/version":
            self._send(b'{"version": "fake"}')
        elif self.path == "/v1/models":
            self._send(b'{"data": [{"id": "verifier"}]}')
        else:
            self._send(b"{}")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refuse and len(self.server.requests) > 2:
            self._send(json.dumps({"message": self.server.refuse}).encode(), status=400)
            return
        prompt = request["prompt"]
        tokens = self.server.rule(prompt, request["max_tokens"])[: request["max_tokens"]]
        with self.server.lock:
            self.server.requests.append(request)
        logprobs = None
        if request.get("logprobs"):
            top = {f"token_id:{token}": value for token, value in self.server.logprobs.items()}
            logprobs = {"tokens": list(top)[:1], "token_logprobs": list(top.values())[:1], "top_logprobs": [top]}
        choice = {
            "index": 0,
            "text": " ".join(map(str, tokens)),
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "finish_reason": "length",
            "logprobs": logprobs,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        self._send(json.dumps({"id": "cmpl-1", "choices": [choice], "usage": usage}).encode())
        self.server.count(len(prompt), len(tokens))

    def _send(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silence."""


@contextmanager
def fake_vllm(rule: Rule, logprobs: dict[int, float] | None = None) -> Iterator[FakeVllm]:
    """Run a fake server in a thread."""
    server = FakeVllm(rule, logprobs)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def counting_up(prompt: list[int], max_tokens: int) -> list[int]:
    """Continue with the last token plus one, two, ..."""
    return [prompt[-1] + i + 1 for i in range(max_tokens)]
