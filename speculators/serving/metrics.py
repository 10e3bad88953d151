"""vLLM's counters, read from its /metrics page."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import zip_longest

import httpx

from speculators.errors import ServingError

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class SpecDecodeCounters:
    """Counters since the server's start, summed over its engines; a server without drafter has zeros.

    Attributes:
        drafts: Verification steps that had a draft.
        draft_tokens: Tokens proposed.
        accepted_tokens: Proposed tokens that the verifier accepted.
        accepted_per_position: How often the draft's token k was accepted, k from 0.
        generation_tokens: Tokens generated.
        prompt_tokens: Prompt tokens processed.
        request_success: Requests finished.
    """

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    accepted_per_position: list[float] = field(default_factory=list)
    generation_tokens: float = 0.0
    prompt_tokens: float = 0.0
    request_success: float = 0.0

    def __sub__(self, before: SpecDecodeCounters) -> SpecDecodeCounters:
        """What happened between two readings."""
        pairs = zip_longest(self.accepted_per_position, before.accepted_per_position, fillvalue=0.0)
        return SpecDecodeCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            [mine - theirs for mine, theirs in pairs],
            self.generation_tokens - before.generation_tokens,
            self.prompt_tokens - before.prompt_tokens,
            self.request_success - before.request_success,
        )


def parse_counters(page: str) -> SpecDecodeCounters:
    """Read the counters out of a page in Prometheus' text format (names as in vllm/v1/spec_decode/metrics.py)."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in page.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, value = sample["name"], float(sample["value"])
        totals[name] = totals.get(name, 0.0) + value
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            position = _POSITION.search(sample["labels"] or "")
            if position is not None:
                positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
    return SpecDecodeCounters(
        totals.get("vllm:spec_decode_num_drafts_total", 0.0),
        totals.get("vllm:spec_decode_num_draft_tokens_total", 0.0),
        totals.get("vllm:spec_decode_num_accepted_tokens_total", 0.0),
        [positions.get(k, 0.0) for k in range(max(positions, default=-1) + 1)],
        totals.get("vllm:generation_tokens_total", 0.0),
        totals.get("vllm:prompt_tokens_total", 0.0),
        totals.get("vllm:request_success_total", 0.0),
    )


def read_counters(url: str) -> SpecDecodeCounters:
    """Fetch and parse the counters of the server at a base URL.

    Raises:
        ServingError: The server does not answer, or its page has no vLLM counters.
    """
    address = f"{url.rstrip('/')}/metrics"
    try:
        response = httpx.get(address, timeout=30)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise ServingError(f"Cannot read vLLM's counters at {address}: {error}") from error
    if "vllm:" not in response.text:
        raise ServingError(f"{address} has no counters of vLLM. Is another program serving there?")
    return parse_counters(response.text)
