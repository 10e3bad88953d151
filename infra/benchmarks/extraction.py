"""What saving hidden states costs vLLM: prefill with and without, and one pass against generating, then extracting.

Run it:  .venv/bin/python -m infra.benchmarks.extraction [--config FILE] [--set section.field=value] [--prompts 64]
             [--rounds 3] [--context 600]

Both servers run side by side and take turns, round by round; each ratio is that of the medians of one run. Answers have
100 tokens. What comes with the project are short prompts; --context puts text of at least that many tokens before each,
as prompts with documents have.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from transformers import AutoTokenizer

from speculators.config import RetrainConfig, load_config
from speculators.data.prompts import load_prompts
from speculators.hidden_states.capture import Capture
from speculators.manifest import Stage, StagePlan
from speculators.plan import state_format
from speculators.serving.client import Completion, VllmClient
from speculators.serving.vllm_server import VllmServer
from speculators.store import Store
from speculators.verifier import Verifier, resolve_verifier

ANSWER_TOKENS = 100


def main() -> None:
    """Run the rounds and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", "-c", help="YAML file with the configuration")
    parser.add_argument("--set", "-s", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=0)
    arguments = parser.parse_args()
    # Cached prefixes would make the later rounds free.
    caching = 'serving.extra_args=["--no-enable-prefix-caching"]'
    config = load_config(arguments.config, [caching, *arguments.set])
    asyncio.run(run(config, arguments.prompts, arguments.rounds, arguments.context))


def questions(config: RetrainConfig, verifier: Verifier, count: int, context: int) -> list[str]:
    """First turns of prompts, each after other prompts' text of at least ``context`` tokens, which no two share."""
    turns = [prompt.turns[0] for prompt in load_prompts(config.regenerate.prompts)]
    tokenizer = AutoTokenizer.from_pretrained(verifier.path)
    source, asked = random.Random(0), []
    for turn in turns[:count]:
        before: list[str] = []
        while len(tokenizer.encode("\n".join(before))) < context:
            before.append(source.choice(turns))
        asked.append("\n".join([*before, turn]))
    return asked


async def run(config: RetrainConfig, count: int, rounds: int, context: int) -> None:
    """Measure with real servers; the states go to the configured store, and are removed in the end."""
    verifier, store, work = resolve_verifier(config), Store(config.store), Path(config.work_dir)
    plan = StagePlan(Stage.EXTRACT, {"benchmark": time.time(), "states": state_format(config, verifier).to_json()})
    capture = Capture(config, plan, store, verifier)
    prompts = questions(config, verifier, count, context)
    section, slots = config.regenerate, config.extract.concurrency
    with (
        VllmServer(config.serving, verifier.path, work, name="plain") as plain_server,
        capture.server("saving") as saving_server,
    ):
        async with (
            VllmClient([plain_server.url], slots, section.request_timeout_s, section.max_retries) as plain,
            VllmClient([saving_server.url], slots, section.request_timeout_s, section.max_retries) as saving,
        ):

            async def ask(client: VllmClient, number: int, saved: str) -> Completion:
                message = {"role": "user", "content": prompts[number]}
                fields = {"kv_transfer_params": capture.request(saved)} if saved else {}
                return await client.chat(
                    [message], max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, **fields
                )

            async def prefill(client: VllmClient, tokens: list[int], saved: str) -> Completion:
                fields = {"kv_transfer_params": capture.request(saved, 0)} if saved else {}
                return await client.complete(tokens, max_tokens=1, temperature=0.0, **fields)

            answers: list[Completion] = []

            async def generate(client: VllmClient, saved: str) -> int:
                asked = (ask(client, n, saved and f"{saved}/{n}") for n in range(len(prompts)))
                answers[:] = await asyncio.gather(*asked)
                return sum(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in answers)

            async def extract(client: VllmClient, saved: str) -> int:
                samples = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
                await asyncio.gather(*(prefill(client, s, saved and f"{saved}/{n}") for n, s in enumerate(samples)))
                return sum(map(len, samples))

            await generate(plain, "")
            await extract(plain, "")
            await extract(saving, "warm-up")
            cases: dict[str, Callable[[str], Awaitable[int]]] = {
                "prefill": lambda name: extract(plain, ""),
                "prefill, states saved": lambda name: extract(saving, name),
                "generate": lambda name: generate(plain, ""),
                "generate, states saved (one pass)": lambda name: generate(saving, name),
            }
            seconds: dict[str, list[float]] = {case: [] for case in cases}
            tokens: dict[str, int] = {}
            for number in range(rounds):
                for case, work_on in cases.items():
                    started = time.monotonic()
                    tokens[case] = await work_on(f"{case}-{number}")
                    seconds[case].append(time.monotonic() - started)
        names = ["warm-up", *(f"{case}-{number}" for case in cases if "saved" in case for number in range(rounds))]
        expected = [f"{name}/{number}" for name in names for number in range(len(prompts))]
        capture.wait_for(expected)
    saved = sum(len(sidecar.samples) for sidecar in capture.sidecars.values())
    store.delete(plan.directory)
    report(seconds, tokens, saved, len(expected))


def report(seconds: dict[str, list[float]], tokens: dict[str, int], saved: int, expected: int) -> None:
    """Print what was measured."""
    middle = {case: statistics.median(values) for case, values in seconds.items()}
    print("\n| Case | Seconds, each round | Tokens/s (median) |\n| --- | --- | --- |")
    for case, values in seconds.items():
        print(f"| {case} | {', '.join(f'{value:.1f}' for value in values)} | {tokens[case] / middle[case]:.0f} |")
    plain, saving, alone, one_pass = middle.values()
    print(f"\nSaved: {saved} samples of {expected}.")
    print(f"Prefill with states saved, tokens/s against plain prefill: {plain / saving:.3f}")
    print(f"One pass against generating, then extracting: {(alone + saving) / one_pass:.2f} times faster")


if __name__ == "__main__":
    main()
