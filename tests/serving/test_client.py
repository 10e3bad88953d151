"""The client against a real HTTP server that misbehaves in every way that servers do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from speculators.errors import ServingError
from speculators.serving.client import Completion, VllmClient
from speculators.serving.metrics import parse_counters

GOOD = {"choices": [{"prompt_token_ids": [1, 2], "token_ids": [3], "text": "x", "finish_reason": "stop"}]}


class Server(ThreadingHTTPServer):
    """Answers completions from a script: a status, ``"cut"`` for a broken connection, or a JSON value."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[object] = []
        self.bodies: list[dict] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"data": [{"id": "some-model"}]}).encode())

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        action = self.server.script.pop(0) if self.server.script else GOOD
        if action == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
            self.close_connection = True
        elif isinstance(action, int):
            self.reply(action, b'{"error": "told to fail"}')
        elif isinstance(action, bytes):
            self.reply(200, action)
        else:
            self.reply(200, json.dumps(action).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def complete(urls: list[str], retries: int = 3) -> Completion:
    async def run() -> Completion:
        async with VllmClient(urls, 4, 10, retries) as client:
            return await client.complete([1, 2], max_tokens=1, kv_transfer_params={"sample_id": "s"})

    return asyncio.run(run())


def test_request_and_answer(server: Server) -> None:
    answer = complete([server.url])
    assert (answer.prompt_token_ids, answer.token_ids, answer.text, answer.finish_reason) == ([1, 2], [3], "x", "stop")
    [body] = server.bodies
    assert body["model"] == "some-model"
    assert body["return_token_ids"] is True
    assert body["kv_transfer_params"] == {"sample_id": "s"}


@pytest.mark.parametrize("failure", [500, 503, 429, "cut", b"not json", {"choices": []}])
def test_what_passes_is_tried_again(server: Server, failure: object) -> None:
    server.script = [failure, failure]
    assert complete([server.url]).token_ids == [3]
    assert len(server.bodies) == 3


def test_what_does_not_pass_is_reported(server: Server) -> None:
    server.script = [500] * 10
    with pytest.raises(ServingError, match=r"failed 3 times.*HTTP 500"):
        complete([server.url], retries=2)
    assert len(server.bodies) == 3


def test_a_refused_request_is_not_repeated(server: Server) -> None:
    server.script = [400]
    with pytest.raises(ServingError, match="told to fail"):
        complete([server.url])
    assert len(server.bodies) == 1


def test_a_server_without_token_ids_is_named_as_such(server: Server) -> None:
    server.script = [{"choices": [{"text": "x", "finish_reason": "stop"}]}]
    with pytest.raises(ServingError, match="return_token_ids"):
        complete([server.url])


def test_an_empty_answer_is_an_answer(server: Server) -> None:
    server.script = [{"choices": [{"prompt_token_ids": [1, 2], "token_ids": [], "text": "", "finish_reason": "stop"}]}]
    assert complete([server.url]).token_ids == []


def test_a_dead_endpoint_is_left_for_a_living_one(server: Server) -> None:
    async def run() -> list[Completion]:
        async with VllmClient(["http://127.0.0.1:9", server.url], 4, 10, 8) as client:
            return list(await asyncio.gather(*[client.complete([1, 2], max_tokens=1) for _ in range(12)]))

    assert len(asyncio.run(run())) == 12


def test_counters_are_summed_over_engines_and_subtracted() -> None:
    def page(factor: int) -> str:
        lines = ["# HELP vllm:x y"]
        for engine in "01":
            label = f'engine="{engine}",model_name="m"'
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{label}}} {10 * factor}.0",
                f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {20 * factor}.0",
                f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {5 * factor}.0",
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="0"}} {4 * factor}.0',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="1"}} {factor}.0',
                f'vllm:request_success_total{{{label},finished_reason="stop"}} {factor}.0',
            ]
        return "\n".join(lines)

    difference = parse_counters(page(3)) - parse_counters(page(1))
    assert (difference.drafts, difference.draft_tokens, difference.accepted_tokens) == (40, 80, 20)
    assert difference.accepted_per_position == [16, 4]
    assert difference.request_success == 4
    assert parse_counters("vllm:generation_tokens_total 7").accepted_per_position == []
