"""Places in a sequence: marks, going back to them, and taking tokens out of the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.engine.preempt import MakeRoom
from quire.engine.prefix_cache import PrefixCache
from quire.engine.sequence import Mark, Sequence
from quire.errors import RequestError
from quire.memory.interface import Memory, Status


class Places:
    """Moves sequences back and forth in what they hold; `hold` brings their pages into memory."""

    def __init__(
        self, memory: Memory, prefix: PrefixCache, room: MakeRoom, hold: Callable[[Sequence], None]
    ) -> None:
        self.memory = memory
        self.prefix = prefix
        self.room = room
        self.hold = hold

    def mark(self, sequence: Sequence, name: str) -> Mark:
        """Keeps a sequence as it is now."""
        self.hold(sequence)
        checkpoint = self.memory.checkpoint_save(sequence.id)
        return Mark(
            name, tuple(sequence.tokens), sequence.computed, sequence.logits, sequence.moved,
            checkpoint, self.memory,
        )  # fmt: skip

    def check_mark(self, mark: Mark) -> None:
        """Refuses a mark that memory does not hold."""
        if mark.memory is not self.memory:
            raise RequestError(f"mark {mark.name!r} was made with another model")
        if mark.checkpoint not in self.memory.checkpoints.by_name:
            raise RequestError(f"mark {mark.name!r} is gone: it was dropped, or its session closed")

    def truncate(self, sequence: Sequence, length: int, marks: Iterable[Mark] = ()) -> None:
        """Drops all tokens from position `length` on.

        Where memory cannot go back so far, the nearest place that a mark or somebody else holds
        is gone back to, and the rest is computed again.
        """
        self.hold(sequence)
        if self.memory.seq_rm(sequence.id, length, -1):
            del sequence.tokens[length:]
            if sequence.computed > length:
                sequence.computed, sequence.logits = length, None
            self.prefix.track(sequence)
        elif sequence.moved:
            raise RequestError(
                f"position {length} cannot be restored: nothing covers it any more; "
                "make a checkpoint before the place to return to"
            )
        else:
            self.memory.seq_rm(sequence.id, 0, -1)
            del sequence.tokens[length:]
            sequence.logits = None
            self.prefix.adopt(sequence)
            self._start_from(sequence, marks)

    def _start_from(self, sequence: Sequence, marks: Iterable[Mark]) -> None:
        """Goes to the furthest mark along a sequence's tokens, if that is further than it is."""
        tokens = sequence.tokens
        fitting = [
            m for m in marks if not m.moved and tuple(tokens[: m.computed]) == m.computed_tokens
        ]
        best = max(fitting, key=lambda m: m.computed, default=None)
        if best is not None and best.computed > sequence.computed:
            self.memory.checkpoint_restore(sequence.id, best.checkpoint)
            sequence.computed = best.computed

    def remove(self, sequence: Sequence, start: int, stop: int) -> None:
        """Takes computed tokens out of the middle; those behind move up, rotated, in place."""
        self.hold(sequence)
        behind = stop < len(sequence.tokens)
        before = self.memory.checkpoint_save(sequence.id)
        try:
            removed = self.memory.seq_rm(sequence.id, start, stop)
            if not removed:
                raise RequestError(
                    f"tokens {start} to {stop} cannot be taken out: the model's memory has them "
                    "in a state or has passed them; rewind and append the rest instead"
                )
            if behind:
                self.memory.seq_add(sequence.id, stop, -1, start - stop)
        except RequestError:
            self.memory.checkpoint_restore(sequence.id, before)
            raise
        finally:
            self.memory.checkpoint_delete(before)
        del sequence.tokens[start:stop]
        sequence.computed -= stop - start
        sequence.logits = None
        if behind:
            if self._update(sequence, optimize=True) or self._update(sequence, optimize=False):
                sequence.moved = True
            else:  # no room to turn shared pages in: the tokens are computed where they are now
                self.room.give_up(sequence)
        self.prefix.track(sequence)

    def _update(self, sequence: Sequence, optimize: bool) -> bool:
        """Does what is pending on a sequence; False where there is no room for that."""
        while True:
            with self.memory.init_update(optimize) as update:
                if not update.status.is_fail:
                    if update.status is Status.SUCCESS:
                        update.apply()
                    return True
            if not (self.room.evict_one() or self.room.park_idle(but=sequence)):
                return False

    def restore(self, sequence: Sequence, mark: Mark) -> None:
        """Makes a sequence what a mark holds."""
        self.check_mark(mark)
        self.memory.checkpoint_restore(sequence.id, mark.checkpoint)
        sequence.tokens[:] = mark.tokens
        sequence.computed, sequence.logits = mark.computed, mark.logits
        sequence.moved, sequence.parked, sequence.given_up = mark.moved, False, False
        self.prefix.track(sequence)

    def want_logits(self, sequence: Sequence) -> None:
        """Has a sequence's last token computed once more, where its logits are not known."""
        if sequence.pending == 0 and sequence.logits is None:
            last = sequence.tokens[-1]
            self.truncate(sequence, len(sequence.tokens) - 1)
            sequence.tokens.append(last)
            self.prefix.track(sequence)
