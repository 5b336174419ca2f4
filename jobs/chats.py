"""Conversations, as the chat template of a tokenizer writes them, and which parts of them are learned."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

_ASSISTANT = "assistant"
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What begins an answer in templates whose authors have marked them."""


def chat_parts(tokenizer: Any, example: Mapping[str, Any]) -> tuple[str, str]:
    """Return ``messages`` as the chat template writes them: all up to the answer, which is the last one, and that.

    Raises:
        ValueError: the last message is no answer.
    """
    messages = _messages(example)
    if not messages or messages[-1]["role"] in ("system", "developer", "user", "tool"):
        role = repr(messages[-1]["role"]) if messages else "missing"
        raise ValueError(f"the last message is the answer to learn, and its role is {role}; end with the assistant's")

    whole = _written(tokenizer, example, messages)
    prompt = _written(tokenizer, example, messages[:-1], add_generation_prompt=True) if messages[1:] else None
    if prompt is not None and whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    # Some templates open a chain of thoughts in a prompt, or leave out earlier ones. The answer then begins where
    # conversations with other answers begin to differ.
    others = [_written(tokenizer, example, [*messages[:-1], other]) for other in _others(messages[-1])]
    start = min(_common([whole, other]) for other in others)
    return whole[:start], whole[start:]


def leaves_out_text(tokenizer: Any, example: Mapping[str, Any]) -> bool:
    """Return whether the chat template leaves out the text of one of the ``messages``, if the example has any."""
    if "messages" not in example:
        return False
    written = _written(tokenizer, example, _messages(example))
    texts = [message.get("content") for message in example["messages"]]
    return not all(text.strip() in written for text in texts if isinstance(text, str))


def assistant_tokens(tokenizer: Any, example: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
    """Return the tokens of ``messages``, and which of them are answers: as the markers of the template say, if any.

    Without markers, an answer ends where it would end as the last one of its conversation.

    Raises:
        ValueError: there is no answer, or the template has no markers and writes answers that are not the last one in
            another way.
    """
    messages = _messages(example)
    if not any(message["role"] == _ASSISTANT for message in messages):
        raise ValueError("no message has the role 'assistant', so that nothing is learned")
    if _MARKERS.search(tokenizer.chat_template):
        made = tokenizer.apply_chat_template(
            messages, tools=example.get("tools"), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(made["input_ids"]), [bool(token) for token in made["assistant_masks"]]
    whole = _written(tokenizer, example, messages)
    tokens: list[int] = tokenizer(whole, add_special_tokens=False)["input_ids"]

    def place(characters: int) -> int:
        return _common([tokenizer(whole[:characters], add_special_tokens=False)["input_ids"], tokens])

    learned = [False] * len(tokens)
    for number, message in enumerate(messages):
        if message["role"] == _ASSISTANT and (found := _span(tokenizer, example, messages, number, whole)) is not None:
            first, end = map(place, found)
            learned[first:end] = [True] * (end - first)
    return tokens, learned


def _span(
    tokenizer: Any, example: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], number: int, whole: str
) -> tuple[int, int] | None:
    """Return where the answer ``number`` begins and ends in the text; None if the template leaves it out."""
    before, after = messages[:number], messages[number + 1 :]
    alone, _ = chat_parts(tokenizer, {**example, "messages": messages[: number + 1]})
    last = _written(tokenizer, example, messages[: number + 1])
    if whole.startswith(last):
        return len(alone), len(last)
    others = [*_others(messages[number])]
    changed = [_written(tokenizer, example, [*before, other, *after]) for other in others]
    if changed[0] == changed[1]:
        return None
    first = min(_common([whole, text]) for text in changed)
    end = len(whole) - min(_common([whole[::-1], text[::-1]]) for text in changed)
    ended = min(_common([last[::-1], _written(tokenizer, example, [*before, o])[::-1]]) for o in others)
    closing = last[len(last) - ended :]
    if not whole[end:].startswith(closing):
        raise ValueError(
            f"the chat template closes message {number + 1} otherwise than as the last one of a conversation, and has "
            "no {% generation %} markers; put them around the answers, or set job.assistant_only_loss=false"
        )
    return first, end + len(closing)


def _messages(example: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in m.items() if value is not None} for m in example["messages"]]


def _written(tokenizer: Any, example: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(list(messages), tools=example.get("tools"), tokenize=False, **options)
    return text


def _others(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the message with two other texts, which have no beginning and no end in common."""
    as_parts = isinstance(message.get("content"), list)
    return [{**message, "content": [{"type": "text", "text": t}] if as_parts else t} for t in ("0", "1")]


def _common(sequences: Sequence[Any]) -> int:
    """Return how many characters or tokens the beginnings have in common."""
    return len(os.path.commonprefix(sequences))  # noqa: RUF071 - no paths
