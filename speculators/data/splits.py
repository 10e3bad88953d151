"""Which prompts are trained on, which choose the best checkpoint, and which are kept for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from speculators.config import RetrainConfig
from speculators.errors import DataError

SPLITS = ("train", "validation", "held_out")


def split_prompts(texts: Mapping[str, str], config: RetrainConfig) -> dict[str, str]:
    """Split of each prompt, by a hash of ``split_seed`` and the text of its first turn.

    So equal prompts never stand in two splits, and neither ids nor the order of the file matter. The lowest hashes are
    held out, the next ones are for validation: prompts that are added can take such a place, but never move a training
    prompt there.

    Args:
        texts: First turns by prompt id.

    Raises:
        DataError: There are too few different prompts.
    """
    section = config.prepare

    def order(text: str) -> str:
        return hashlib.sha256(f"{section.split_seed}:{text}".encode()).hexdigest()

    groups: dict[str, list[str]] = {}
    for prompt_id, text in texts.items():
        groups.setdefault(text.strip(), []).append(prompt_id)
    needed = section.held_out_prompts + section.validation_prompts
    if len(groups) <= needed:
        raise DataError(
            f"There are {len(groups)} different prompts, but prepare.held_out_prompts ({section.held_out_prompts}) and"
            f" prepare.validation_prompts ({section.validation_prompts}) take {needed} and none is left to train on."
            " Use more prompts or lower these."
        )
    splits = {}
    for place, text in enumerate(sorted(groups, key=order)):
        is_held_out, is_validation = place < section.held_out_prompts, place < needed
        split = "held_out" if is_held_out else "validation" if is_validation else "train"
        splits.update(dict.fromkeys(groups[text], split))
    return splits
