"""What a rank has enqueued in its process groups, as the flight recorder of torch knows it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_POINT_TO_POINT = re.compile(r"\w+:(?:send (\d+)->(\d+)|recv (\d+)<-(\d+))")

_DEFAULT_GROUP = "default_pg"
"""How torch describes the default process group."""

Message = tuple[str, int, int]
"""The name of a process group, and in it the ranks of the sender and the receiver."""


@dataclass(frozen=True, kw_only=True)
class Enqueued:
    """The operations that one rank has enqueued in the process groups of a generation, by the names of the groups.

    Attributes:
        last: the number of the last collective operation, from 1.
        operation: what that operation is, such as ``nccl:all_reduce``.
        members: the global ranks of a group, in their order in it; a group is left out if they are unknown.
        sends: how many sends have not completed.
        receives: how many receives have not completed.
        unfinished: the number of the newest operation of all if it has not completed; None if it has.
    """

    last: Mapping[str, int] = field(default_factory=dict)
    operation: Mapping[str, str] = field(default_factory=dict)
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sends: Mapping[Message, int] = field(default_factory=dict)
    receives: Mapping[Message, int] = field(default_factory=dict)
    unfinished: int | None = None


def enqueued_in(dump: str, *, since_ns: int, world_size: int) -> Enqueued:
    """Return what a rank has enqueued, from the dump of its flight recorder.

    Args:
        dump: JSON, as ``torch._C._distributed_c10d._dump_fr_trace_json`` returns it.
        since_ns: when the process groups were formed, in nanoseconds since the epoch. Groups of earlier generations
            have the same names.
        world_size: the number of ranks of the default group, which torch records only in the first generation.
    """
    content = json.loads(dump)
    entries = [entry for entry in content.get("entries", ()) if entry["time_created_ns"] >= since_ns]
    last: dict[str, int] = {}
    operation: dict[str, str] = {}
    for entry in entries:
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        if not entry["is_p2p"] and number > last.get(group, 0):
            last[group], operation[group] = number, entry["profiling_name"]
    sends, receives = _pending(entries)
    members = {name: tuple(json.loads(group["ranks"])) for name, group in content.get("pg_config", {}).items()}
    groups = (entry["process_group"] for entry in entries)
    members |= {name: tuple(range(world_size)) for name, description in groups if description == _DEFAULT_GROUP}
    return Enqueued(
        last=last,
        operation=operation,
        members={name: ranks for name, ranks in members.items() if ranks},
        sends=sends,
        receives=receives,
        unfinished=entries[-1]["record_id"] if entries and not _has_completed(entries[-1]) else None,
    )


def _pending(entries: Sequence[Mapping[str, Any]]) -> tuple[Counter[Message], Counter[Message]]:
    """Return the sends and the receives that have not completed.

    Those of a batch share a number with the entry of the batch, and only that entry is marked as completed.
    """
    completed = {
        _number(e)
        for e in entries
        if (bool(e["is_p2p"]) or e["profiling_name"].endswith(":coalesced")) and _has_completed(e)
    }
    sends: Counter[Message] = Counter()
    receives: Counter[Message] = Counter()
    for entry in entries:
        found = _POINT_TO_POINT.fullmatch(entry["profiling_name"])
        if found is None or _number(entry) in completed:
            continue
        sender, receiver, receiving, sending = found.groups()
        group = entry["process_group"][0]
        if sender is not None:
            sends[group, int(sender), int(receiver)] += 1
        else:
            receives[group, int(sending), int(receiving)] += 1
    return sends, receives


def _has_completed(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _number(entry: Mapping[str, Any]) -> tuple[str, int]:
    """Return the group and the number of a message, or of a batch of messages."""
    return entry["process_group"][0], entry["p2p_seq_id"]
