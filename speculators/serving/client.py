"""Requests to one or several vLLM servers: retried, spread by load, with token ids as vLLM generated them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from speculators.errors import ServingError

logger = logging.getLogger(__name__)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_FAILURES_UNTIL_OUT = 5


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        prompt_token_ids: The prompt as vLLM saw it, chat template applied.
        token_ids: What vLLM generated, the stop token included.
        text: The same as text, stop token left out.
        finish_reason: ``stop`` or ``length``.
        logprobs: vLLM's ``logprobs`` object, where asked for.
        kv_transfer_params: What a KV connector returned, if anything.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class _Endpoint:
    url: str
    slots: asyncio.Semaphore
    in_flight: int = 0
    failures: int = 0
    model: str | None = None

    @property
    def out(self) -> bool:
        return self.failures >= _FAILURES_UNTIL_OUT


class VllmClient:
    """An asynchronous client; use it as ``async with``.

    Args:
        urls: Base URLs of servers of the same verifier.
        concurrency_per_url: Requests in flight at each.
        timeout_s: Seconds that one request may take.
        max_retries: How often a request is tried again after a lost connection, a time-out, 429 or 5xx.
    """

    def __init__(self, urls: Sequence[str], concurrency_per_url: int, timeout_s: float, max_retries: int) -> None:
        if not urls:
            raise ServingError("No vLLM endpoint was given.")
        self._endpoints = [_Endpoint(url.rstrip("/"), asyncio.Semaphore(concurrency_per_url)) for url in urls]
        self._max_retries = max_retries
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=30), limits=httpx.Limits())

    async def __aenter__(self) -> VllmClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def chat(self, messages: Sequence[Mapping[str, str]], **sampling: Any) -> Completion:
        """Answer a conversation through the chat template that vLLM serves.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            **sampling: Further fields of the request (max_tokens, temperature, seed, ...).

        Raises:
            ServingError: No endpoint gave a usable answer; says what the last one said.
        """
        body = await self._post("/v1/chat/completions", {"messages": list(messages), **sampling})
        choice = body["choices"][0]
        return self._completion(body, body.get("prompt_token_ids"), choice, choice["message"].get("content") or "")

    async def complete(self, prompt_token_ids: Sequence[int], **sampling: Any) -> Completion:
        """Continue a prompt given as token ids.

        Args:
            prompt_token_ids: The prompt.
            **sampling: Further fields of the request (max_tokens, logprobs, kv_transfer_params, ...).

        Raises:
            ServingError: As in :meth:`chat`.
        """
        body = await self._post("/v1/completions", {"prompt": [int(t) for t in prompt_token_ids], **sampling})
        choice = body["choices"][0]
        return self._completion(body, choice.get("prompt_token_ids"), choice, choice.get("text") or "")

    @staticmethod
    def _completion(body: dict[str, Any], prompt: list[int] | None, choice: dict[str, Any], text: str) -> Completion:
        tokens = choice.get("token_ids")
        if tokens is None or prompt is None:
            raise ServingError(
                "The endpoint returned no token ids (it ignores `return_token_ids`). Training data must be the tokens"
                " that vLLM generated: use vLLM 0.32 or a version that knows this field."
            )
        finish_reason = choice.get("finish_reason") or "stop"
        return Completion(prompt, tokens, text, finish_reason, choice.get("logprobs"), body.get("kv_transfer_params"))

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        last = "no endpoint was tried"
        for attempt in range(self._max_retries + 1):
            endpoint = self._least_loaded(last)
            endpoint.in_flight += 1
            try:
                async with endpoint.slots:
                    answer = await self._try(endpoint, path, body)
                endpoint.failures = 0
                return answer
            except _Retryable as error:
                last = f"{endpoint.url}: {error}"
                endpoint.failures += error.counts
                if endpoint.out and len(self._endpoints) > 1:
                    logger.warning("vLLM endpoint %s is taken out: %s", endpoint.url, error)
            finally:
                endpoint.in_flight -= 1
            if attempt < self._max_retries:
                delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**attempt)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
        raise ServingError(f"A request failed {self._max_retries + 1} times; last at {last}")

    def _least_loaded(self, last: str) -> _Endpoint:
        usable = [endpoint for endpoint in self._endpoints if not endpoint.out]
        if not usable:
            raise ServingError(f"Every vLLM endpoint failed {_FAILURES_UNTIL_OUT} times in a row; last: {last}")
        return min(usable, key=lambda endpoint: endpoint.in_flight)

    async def _try(self, endpoint: _Endpoint, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            if endpoint.model is None:
                endpoint.model = await self._served_model(endpoint.url)
            response = await self._http.post(
                endpoint.url + path, json={"model": endpoint.model, "return_token_ids": True, **body}
            )
            _raise_for_status(response)
            answer = response.json()
            if not isinstance(answer, dict) or not answer.get("choices"):
                raise _Retryable("an answer without choices")
            return answer
        except httpx.TimeoutException as error:
            raise _Retryable("the request timed out") from error
        except httpx.TransportError as error:
            raise _Retryable(f"the connection failed ({type(error).__name__})") from error
        except ValueError as error:
            raise _Retryable("an answer that is not JSON (cut off?)") from error

    async def _served_model(self, url: str) -> str:
        response = await self._http.get(f"{url}/v1/models")
        _raise_for_status(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServingError(f"{url}/v1/models lists no model. Is this a vLLM server?") from error


class _Retryable(Exception):
    """Something that another try may mend; ``counts`` towards taking the endpoint out."""

    def __init__(self, message: str, counts: int = 1) -> None:
        super().__init__(message)
        self.counts = counts


def _raise_for_status(response: httpx.Response) -> None:
    status = response.status_code
    if status == 429:
        raise _Retryable("429 (too many requests)", counts=0)
    if status >= 500:
        raise _Retryable(f"HTTP {status}")
    if status >= 400:
        raise ServingError(f"{response.request.url} refused the request with HTTP {status}: {response.text[:500]}")
