"""A reverse proxy that stands between S3 clients and an S3 server (moto's) and injects faults into the traffic.

    with FaultyS3(upstream="http://127.0.0.1:5000") as proxy:
        proxy.inject("slow_down", methods={"PUT"}, match="/bucket/key", times=2)
        ...  # a client whose endpoint is proxy.url
        assert proxy.injected["slow_down"] == 2

The faults:
    reset              close the client's connection with a RST once its request is read, without forwarding it
    reset_after        forward it, then RST instead of the answer: the client cannot know whether it worked
    error_500, slow_down, expired, skewed, denied
                       answer with S3's InternalError, SlowDown, ExpiredToken, RequestTimeTooSkewed or AccessDenied
    truncate_response  answer with the whole Content-Length but half of the body, then close
    truncate_upload    forward half of a PUT's body, without its checksums, and answer that all went well
    flip_byte          flip one bit in the middle of the body that answers a GET
    throttle           read the request's body and write the answer's at `bytes_per_s` each (None: at full speed)
    delay              wait `delay_s` before forwarding, which also happens when the client has left by then

Host, signature and aws-chunked framing pass as the client sent them; chunked transfer encoding is replaced by a
Content-Length, and `Expect: 100-continue` is answered here. Requests and answers are held in memory whole.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, responses
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import ThreadingTCPServer
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import urlsplit

ERRORS = {
    "error_500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "slow_down": (503, "SlowDown", "Please reduce your request rate."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "skewed": (403, "RequestTimeTooSkewed", "The difference between request time and current time is too large."),
    "denied": (403, "AccessDenied", "Access Denied"),
}
FAULTS = {*ERRORS, "throttle", "delay", "reset", "reset_after", "truncate_upload", "truncate_response", "flip_byte"}

Headers = list[tuple[str, str]]
HOP_BY_HOP = {"connection", "keep-alive", "te", "transfer-encoding", "expect", "content-length"}
UPLOAD_CHECKS = {"content-md5", "x-amz-trailer", "x-amz-sdk-checksum-algorithm", "x-amz-decoded-content-length"}


@dataclass
class _Rule:
    fault: str
    methods: Collection[str] | None
    match: str
    times: int | None
    probability: float
    chance: random.Random


class FaultyS3(ThreadingTCPServer):
    """The proxy: listens on loopback at `url`, serves from `with` to the end of its block."""

    request_queue_size = 128

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.bytes_per_s: float | None = None
        self.delay_s = 1.0
        self.counts: Counter[str] = Counter()  # requests by method
        self.injected: Counter[str] = Counter()  # faults by name
        self.errors: list[BaseException | None] = []  # what else went wrong: mostly a client or upstream gone
        self.stopping = Event()  # ends all waits
        self.opened: list[socket.socket] = []  # all sockets to clients and upstream; __exit__ closes those left
        self.lock = Lock()
        self._rules: list[_Rule] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        # Unbounded, the kernel would take in megabytes of a throttled upload at once.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = Thread(target=self.serve_forever, args=(0.05,), name="faulty-s3", daemon=True)

    def inject(
        self,
        fault: str,
        *,
        methods: Collection[str] | None = None,
        match: str = "",
        times: int | None = None,
        probability: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Give `fault` to the requests of these methods (None: all) with `match` in their path and query as sent.

        `times` of them get it (None: until cleared), each with `probability`. Of several rules that could answer a
        request the first injected does; "delay", "throttle" and "truncate_upload" combine with others. A fault that
        cannot apply (half of an empty body, a flipped byte in anything but the answer to a GET) is not used up.
        """
        if fault not in FAULTS:
            raise ValueError(f"no fault {fault!r}, only {sorted(FAULTS)}")
        with self.lock:
            self._rules.append(_Rule(fault, methods, match, times, probability, random.Random(seed)))

    def clear(self) -> None:
        """Forget all that was injected; the counters stay."""
        with self.lock:
            self._rules.clear()

    def take(self, method: str, target: str, *faults: str) -> str | None:
        """The one of these faults that this request is to have, if any, which is then used up and counted."""
        with self.lock:
            for rule in self._rules:
                fits = rule.fault in faults and rule.match in target and rule.times != 0
                fits = fits and (rule.methods is None or method in rule.methods)
                if fits and rule.chance.random() < rule.probability:
                    rule.times = None if rule.times is None else rule.times - 1
                    self.injected[rule.fault] += 1
                    return rule.fault
        return None

    def get_request(self) -> Any:
        """Accept a client's connection."""
        request, address = super().get_request()
        self.opened.append(request)
        return request, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep what socketserver would print."""
        self.errors.append(sys.exc_info()[1])

    def __enter__(self) -> FaultyS3:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stopping.set()
        self.shutdown()
        for sock in self.opened:
            with suppress(OSError):  # most are closed already
                sock.shutdown(socket.SHUT_RDWR)
        self.server_close()  # waits for the connections' threads
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One client's connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultyS3

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def _handle(self) -> None:
        proxy, method, target = self.server, self.command, self.requestline.split()[1]
        with proxy.lock:
            proxy.counts[method] += 1
        self.rate = proxy.bytes_per_s if proxy.bytes_per_s and proxy.take(method, target, "throttle") else None
        body = self._read_body()
        if proxy.take(method, target, "delay"):
            proxy.stopping.wait(proxy.delay_s)
        fault = proxy.take(method, target, "reset", *ERRORS)
        if fault == "reset":
            return self._reset()
        if fault:
            return self._answer_error(*ERRORS[fault])

        headers = [(name, value) for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP]
        if method == "PUT" and body and proxy.take(method, target, "truncate_upload"):
            headers, body = _half_upload(headers, body)
        status, reason, headers, answer = self._forward(method, target, headers, body)

        possible = ["reset_after", *(["truncate_response"] if answer else [])]
        fault = proxy.take(method, target, *possible, *(["flip_byte"] if answer and method == "GET" else []))
        if fault == "reset_after":
            return self._reset()
        half = len(answer) // 2
        if fault == "flip_byte":
            answer = answer[:half] + bytes([answer[half] ^ 1]) + answer[half + 1 :]
        if fault == "truncate_response":
            answer = answer[:half]
            self.close_connection = True
        return self._answer(status, reason, headers, answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = _handle

    def _forward(self, method: str, target: str, headers: Headers, body: bytes) -> tuple[int, str, Headers, bytes]:
        with closing(HTTPConnection(self.server.upstream, timeout=60)) as upstream:
            upstream.connect()
            self.server.opened.append(upstream.sock)
            if self.server.stopping.is_set():
                raise ConnectionAbortedError("the proxy stopped before it forwarded a request")
            upstream.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                upstream.putheader(name, value)
            if body or method in ("PUT", "POST"):
                upstream.putheader("Content-Length", str(len(body)))
            upstream.putheader("Connection", "close")
            upstream.endheaders(body)
            response = upstream.getresponse()
            answer = response.read()
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
        if response.status not in (204, 304):
            headers.append(("Content-Length", response.getheader("Content-Length", str(len(answer)))))
        return response.status, response.reason, headers, answer

    def _answer(self, status: int, reason: str, headers: Headers, body: bytes) -> None:
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        sent = 0
        for size in self._paced(len(body)):
            self.wfile.write(body[sent : sent + size])
            sent += size

    def _answer_error(self, status: int, code: str, message: str) -> None:
        xml = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(xml)))]
        self._answer(status, responses[status], headers, b"" if self.command == "HEAD" else xml.encode())

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.rfile.close()  # the socket's last user: this sends the RST
        self.close_connection = True

    def _read_body(self) -> bytes:
        if "Transfer-Encoding" not in self.headers:
            return self._read(int(self.headers.get("Content-Length", 0)))
        return _dechunked(self.rfile.readline, self._read)

    def _read(self, size: int) -> bytes:
        data = b"".join(self.rfile.read(piece) for piece in self._paced(size))
        if len(data) < size:
            raise ConnectionResetError("the client left in the middle of its upload")
        return data

    def _paced(self, size: int) -> Iterator[int]:
        """The sizes of the pieces in which to move `size` bytes, with a wait after each when throttled."""
        while size > 0:
            piece = min(size, int(self.rate / 20) + 1) if self.rate else size
            yield piece
            if self.rate:
                self.server.stopping.wait(piece / self.rate)
            size -= piece


def _half_upload(headers: Headers, body: bytes) -> tuple[Headers, bytes]:
    """The first half of an upload, without all that would let upstream notice."""
    kept = []
    for name, value in headers:
        key = name.lower()
        if key == "x-amz-content-sha256":
            value = "UNSIGNED-PAYLOAD"
        if key == "content-encoding" and "aws-chunked" in value:
            stream = BytesIO(body)
            body = _dechunked(stream.readline, stream.read)
            value = ",".join(encoding for encoding in value.split(",") if encoding.strip() != "aws-chunked")
        if value and key not in UPLOAD_CHECKS and not key.startswith("x-amz-checksum-"):
            kept.append((name, value))
    return kept, body[: len(body) // 2]


def _dechunked(readline: Callable[[], bytes], read: Callable[[int], bytes]) -> bytes:
    """The payload of chunks framed as `SIZE[;...] CRLF DATA CRLF`, which both HTTP's and AWS's chunked bodies are."""
    chunks = []
    while size := int(readline().split(b";")[0], 16):
        chunks.append(read(size))
        readline()
    while readline().strip():
        pass  # trailers
    return b"".join(chunks)
