"""Continuous batching: which sequences run together in a step, and which prompt is read on between steps.

Requests advance in turns, on the engine's thread. The first one of a round runs a step of all sequences that can run
together; the others find their tokens here when it is their turn. So sequences join and leave between two steps, and a
request that ends, or is cancelled, has computed at most one step too many. Between two steps, at most one chunk of
prompt tokens is read, in order of arrival. Short prompts that wait are read in one forward, which moves experts once.

Sequences take KV memory as they grow. If it runs out, the youngest is preempted: its KV cache goes to host memory, and
it resumes, with all of its tokens, as soon as there is place again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from spmoe.engine.engine import Engine
from spmoe.errors import reason
from spmoe.types import Sequence, Turn

_MAX_FAILURES = 8  # in a row, of steps of several sequences; then sequences run, or are read, in turns


@dataclass(slots=True)
class _Entry:
    """A sequence that waits or runs."""

    sequence: Sequence
    max_new_tokens: int  # of its next step
    new: list[int] = field(default_factory=list)  # tokens of a step that the request has not taken yet
    alone: bool = False  # whether its next step runs alone, since one together with others has failed


class Scheduler:
    """Sequences of an engine: the ones that wait, in order of arrival, and the ones that run."""

    def __init__(self, engine: Engine, max_num_seqs: int) -> None:
        self._engine = engine
        self._max_num_seqs = max_num_seqs
        self._waiting: dict[int, _Entry] = {}  # by sequence id, in order of arrival
        self._running: dict[int, _Entry] = {}
        self._preempted: dict[int, _Entry] = {}
        self.preemptions = 0  # so far
        self._overtakes = 0  # in a row, of the first sequence that waits, by later ones that need less KV memory
        self._read = 0  # tokens of prompts since the last step of a sequence whose prompt was read
        # in a row, of steps of several sequences that did not fail alone; by whether they read prompts
        self._failures = {False: 0, True: 0}

    @property
    def running(self) -> int:
        """Number of sequences that were admitted."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait until others end, preempted ones included."""
        return len(self._waiting) + len(self._preempted)

    def register(self, sequence: Sequence, max_new_tokens: int) -> None:
        """Let a sequence wait for its first step, which may add at most so many tokens."""
        self._waiting[sequence.id] = _Entry(sequence, max_new_tokens)

    def next_tokens(self, sequence: Sequence, max_new_tokens: int) -> list[int] | None:
        """Return the next tokens of a registered sequence, at most so many; None if it has to wait for its next turn.

        An error concerns this sequence alone.
        """
        entry = self._preempted.get(sequence.id) or self._running.get(sequence.id) or self._admit(sequence)
        if entry is None:
            return None
        if not entry.new and not (self._resume(entry) and self._step(entry)):
            return None
        new, entry.new = entry.new, []
        entry.max_new_tokens = max_new_tokens - len(new)
        return new

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, and drop its state in the engine; idempotent."""
        self._waiting.pop(sequence.id, None)
        admitted = self._running.pop(sequence.id, None) or self._preempted.pop(sequence.id, None)
        if admitted is not None:
            self._engine.release(sequence)

    def _admit(self, sequence: Sequence) -> _Entry | None:
        """Let a sequence that waits run; return None while it has to wait."""
        if not self._has_free_place:
            return None
        if not (self._may_read(sequence, self._engine.loop.num_unread(sequence)) and self._is_next(sequence)):
            return None
        self._overtakes = 0 if sequence.id == next(iter(self._waiting)) else self._overtakes + 1
        return self._start(sequence)

    @property
    def _has_free_place(self) -> bool:
        return not self._preempted and self.running < self._max_num_seqs

    def _start(self, sequence: Sequence) -> _Entry:
        if self._running:
            self._engine.note_batching()
        entry = self._running[sequence.id] = self._waiting.pop(sequence.id)
        return entry

    def _is_next(self, sequence: Sequence) -> bool:
        """Return whether a sequence is the first one in order of arrival for which there is place.

        So a small one may overtake a large one, but not without end: after `max_num_seqs` of them the first one waits
        only for those that run.
        """
        candidates = 1 if self._overtakes >= self._max_num_seqs else self._max_num_seqs  # few: each has its turn often
        for one in islice(self._waiting.values(), candidates):
            if not self._running or self._engine.reserve_kv(one.sequence):
                return one.sequence is sequence
        return False

    def _resume(self, entry: _Entry) -> bool:
        """Let a preempted sequence run again if there is place; return whether it runs. The oldest one goes first."""
        number = entry.sequence.id
        if number in self._running:
            return True
        if number != min(self._preempted) or (self._running and not self._engine.loop.can_resume(entry.sequence)):
            return False
        self._engine.resume(entry.sequence)
        self._running[number] = self._preempted.pop(number)
        return True

    def _make_place(self, entry: _Entry) -> bool:
        """Give a sequence KV memory for its next step; preempt the youngest ones for it. Return whether it runs."""
        while entry.sequence.id in self._running and not self._engine.reserve_kv(entry.sequence):
            if self.running == 1:
                return True  # it may have more than is planned for, if the device has it
            youngest = max(self._running)
            self._engine.preempt(self._running[youngest].sequence)
            self._preempted[youngest] = self._running.pop(youngest)
            self.preemptions += 1
        return entry.sequence.id in self._running

    def _step(self, entry: _Entry) -> bool:
        """Run a step of a sequence and of all others that can join; return False if it has no new tokens yet."""
        engine, sequence = self._engine, entry.sequence
        if not self._make_place(entry):
            return False
        unread = 0
        if self._max_num_seqs > 1:
            # between the chunks of a prompt others run and join, and requests can be cancelled
            if (unread := engine.loop.num_unread(sequence)) and not self._may_read(sequence, unread):
                return False
            self._read = self._read + unread if unread else 0
            if unread and engine.read_prompt(sequence):
                return False
        reads = unread > 0
        others = self._readers(entry, unread) if reads else self._companions(entry)
        companions = [*islice(others, engine.target.max_batch_rows - 1)]
        batch = [one for one in (entry, *companions) if self._make_place(one)]
        batch = [one for one in batch if one.sequence.id in self._running]  # not preempted for a later one
        if entry not in batch:
            return False
        batch.sort(key=lambda one: one.sequence.id)  # a step of the same sequences is the same, whichever has its turn
        if len(batch) > 1:
            lengths = [len(one.sequence.tokens) for one in batch]
            try:
                self._run(batch)
                self._failures[reads] = 0
                return True
            except Exception as error:  # of one sequence, or of all: each one tries alone, and fails alone
                engine.undo_step([one.sequence for one in batch], lengths)
                for one in batch:
                    one.alone = True
                self._failures[reads] += 1
                if self._failures[reads] == _MAX_FAILURES and reads:
                    engine.note_lone_reads(reason(error))
                elif self._failures[reads] == _MAX_FAILURES:
                    engine.stop_batching(reason(error))
        try:
            self._run([entry])
        except Exception:
            if entry.alone:  # the failures were not due to others
                self._failures[reads] = 0
            raise
        entry.alone = False
        return True

    def _may_read(self, sequence: Sequence, count: int) -> bool:
        """Return whether so many tokens of a sequence's prompt may be read now.

        Prompts are read one after the other, so a later one finds the whole prefix that it shares with an earlier one.
        """
        loop = self._engine.loop
        unread = (one.sequence for one in self._running.values() if not loop.has_read(one.sequence))
        if next(unread, sequence) is not sequence:
            return False
        if not self._read or self._read + count <= loop.prefill_chunk:
            return True
        return not any(loop.has_read(one.sequence) for one in self._running.values())

    def _readers(self, entry: _Entry, unread: int) -> Iterator[_Entry]:
        """Admit and yield the next sequences that wait, as long as their prompts can be read together with this one.

        Prompts with a common prefix that is new are read one after the other, so that the later one need not read it.
        """
        if not self._waiting or entry.alone or self._failures[True] >= _MAX_FAILURES:
            return
        loop, found = self._engine.loop, [entry.sequence]
        if any(loop.has_read(one.sequence) for one in self._running.values()):
            unread = self._read  # since the last step of these
        self._engine.take_kv(entry.sequence)  # so that place is counted for one after the other
        while self._waiting and self._has_free_place:
            one = next(iter(self._waiting.values())).sequence
            count = loop.num_unread(one)
            if unread + count > loop.prefill_chunk or not loop.can_read_together([*found, one]):
                return
            if loop.begins_as_one_of(one, found) or not self._engine.reserve_kv(one):
                return
            try:
                self._engine.take_kv(one)
            except Exception:  # it concerns that sequence alone, which meets it in its own turn
                return
            unread += count
            self._read += count
            self._overtakes = 0
            found.append(one)
            yield self._start(one)

    def _companions(self, entry: _Entry) -> Iterator[_Entry]:
        """Yield the sequences that can run together with this one."""
        can_join = self._engine.loop.can_join
        if entry.alone or not can_join(entry.sequence):
            return
        for other in self._running.values():
            if other is not entry and not other.new and not other.alone and can_join(other.sequence):
                yield other

    def _run(self, batch: list[_Entry]) -> None:
        others_join = self.waiting > 0 and self.running < self._max_num_seqs
        repeats = len(batch) == len(self._running) and not others_join  # else others run, or are read, before the next
        turns = [Turn(one.sequence, one.max_new_tokens, repeats) for one in batch]
        for one, new in zip(batch, self._engine.step(turns), strict=True):
            one.new = new
