"""One call of the embedded engine's ``generate``: continuous batching over the slots of the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lqrl.engines.decoder import Decoder
from lqrl.engines.look import Look
from lqrl.engines.sampling import Sampled, sample_keys, uniforms
from lqrl.engines.slots import PrefillContext, SlotCache
from lqrl.engines.stepper import Stepper
from lqrl.quant.triton_use import on_device
from lqrl.types import Completion, FinishReason, Prompt, SamplingParams


@dataclass
class _Group:
    """A prompt, and the rows of its samples that still wait for a slot."""

    prompt: Prompt
    rows: deque[int]
    hidden: Tensor | None = None  # [H] at the prompt's last token, once it has been prefilled


@dataclass
class _Sequence:
    """A sample in a slot; ``born`` is the step that drew its first token."""

    group: _Group
    row: int
    born: int


@dataclass
class _Admission:
    """Samples that enter together: slots and rows, and for each the index of its group in ``groups``."""

    groups: list[_Group] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    tokens: int = 0


class Generation:
    """Draws all samples of a list of prompts.

    Slots ``0..R-1`` run. A finished sample leaves its slot to a waiting one, or else to the last running one, so that
    every step works on a contiguous view of the cache. A prompt is prefilled once and its keys and values are copied
    to the slots of its other samples.

    Args:
        decoder: the model.
        cache: keys and values.
        stepper: its buffers, and the cache, are reserved here for this call.
        prompts: checked by the engine.
        params: sampling settings.
        seed: see `lqrl.engines.sampling.sample_keys`.
        stop_token_ids: tokens that end a sample.
        max_slots: most samples that run together.
        prefill_tokens: most prompt tokens in one prefill (one prompt may exceed it).
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: SlotCache,
        stepper: Stepper,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        stop_token_ids: Sequence[int],
        max_slots: int,
        prefill_tokens: int,
    ) -> None:
        self._decoder, self._cache, self._stepper = decoder, cache, stepper
        self._params, self._prefill_tokens = params, prefill_tokens
        self._device = device = cache.device
        counts = params.counts(len(prompts))
        self._rows = [(p, params.first_sample + i) for p, n in zip(prompts, counts, strict=True) for i in range(n)]
        rows, self._budget = len(self._rows), params.max_tokens
        starts = [sum(counts[:i]) for i in range(len(counts))]
        self._queue = deque(_Group(p, deque(range(s, s + n))) for p, s, n in zip(prompts, starts, counts, strict=True))
        self._counts = counts
        self._slots = min(max_slots, rows)
        stepper.reserve(self._slots, max(len(p.input_ids) for p in prompts) + self._budget, params)
        # Results lie by row and position, so that a sample that changes its slot moves nothing.
        self._tokens = torch.zeros(rows * self._budget, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(rows * self._budget, device=device)
        self._log_mass = torch.zeros(rows * self._budget if params.truncates else 0, device=device)
        self._uniforms = self._all_uniforms(seed)
        self._is_stop = torch.zeros(decoder.vocabulary, dtype=torch.bool, device=device)
        self._is_stop[list(stop_token_ids)] = True
        self._lengths = [0] * rows
        self._reasons: list[FinishReason] = ["length"] * rows
        self._running: list[_Sequence | None] = []
        self._step = 0
        self._at = torch.zeros(self._slots, dtype=torch.int64, device=device)  # where a slot's next result goes

    def run(self) -> None:
        """Draw everything."""
        while True:
            self._admit()
            self._compact()
            if not self._running:
                return
            self._decode()

    def completions(self, policy_version: int) -> list[list[Completion]]:
        """The samples of each prompt; after `run`.

        Raises:
            RuntimeError: when the model gave NaN or inf.
        """
        shape = len(self._rows), self._budget
        bad = (~self._logprobs.view(shape).isfinite()).any(1).nonzero().flatten().tolist()
        tokens, logprobs = (x.view(shape).cpu() for x in (self._tokens, self._logprobs))
        mass = self._log_mass.view(shape).cpu() if self._params.truncates else torch.zeros(1, 1).expand(shape)
        if bad:
            raise RuntimeError(
                f"the engine's log-probs are not finite for prompt id {self._rows[bad[0]][0].id} and {len(bad) - 1} "
                f"more samples; the weights of policy version {policy_version} give NaN or inf"
            )
        flat = [
            Completion(
                prompt_id=prompt.id,
                sample_index=index,
                token_ids=tokens[row, :length].clone(),
                logprobs=logprobs[row, :length].clone(),
                log_mass=mass[row, :length].clone(),
                finish_reason=reason,
                policy_version=policy_version,
            )
            for row, ((prompt, index), length, reason) in enumerate(
                zip(self._rows, self._lengths, self._reasons, strict=True)
            )
        ]
        done = iter(flat)
        return [[next(done) for _ in range(n)] for n in self._counts]

    @property
    def generated_tokens(self) -> int:
        """Tokens of all samples that have ended."""
        return sum(self._lengths)

    def _all_uniforms(self, seed: int) -> Tensor | None:
        if self._params.temperature == 0:
            return None
        ids = torch.tensor([[p.id, i] for p, i in self._rows], device=self._device)
        keys = sample_keys(seed, ids[:, 0], ids[:, 1])
        at = torch.arange(self._budget, device=self._device)
        return torch.cat([uniforms(part, at).flatten() for part in keys.split(max(1, 2**20 // self._budget))])

    # Admission

    def _admit(self) -> None:
        """Fill free slots with waiting samples; those that end with their first token leave at once."""
        while self._queue:
            entered = list(self._enter())  # all prefills are launched before the host waits for the first
            if not entered:
                return
            for batch, stopped in entered:
                for slot, stop in zip(batch.slots, stopped.tolist(), strict=True):
                    if stop or self._budget == 1:
                        self._finish(slot, 1, stop)

    def _enter(self) -> Iterator[tuple[_Admission, Tensor]]:
        """Admit samples while there are slots; which of them drew a stop token, bool on the device."""
        while self._queue:
            batch = self._choose()
            if not batch.rows:
                return
            logits = self._decoder.logits(self._prefill(batch))
            lengths = [len(batch.groups[group].prompt.input_ids) for group in batch.group_of]
            table = on_device(torch.tensor([batch.rows, batch.group_of, batch.slots, lengths]), self._device)
            at = table[0] * self._budget
            drawn = self._draw(logits.index_select(0, table[1]), at)
            for held, values in zip(self._of_slots(), (drawn.tokens, table[3], at + 1), strict=True):
                held.index_copy_(0, table[2], values)
            for slot, row, group in zip(batch.slots, batch.rows, batch.group_of, strict=True):
                self._running[slot] = _Sequence(batch.groups[group], row, self._step)
            yield batch, self._is_stop[drawn.tokens]

    def _choose(self) -> _Admission:
        """Waiting samples for the free slots, within the token budget of one prefill."""
        free = deque(slot for slot, sequence in enumerate(self._running) if sequence is None)
        free.extend(range(len(self._running), self._slots))
        batch = _Admission()
        while free and self._queue:
            group = self._queue[0]
            needs = 0 if self._donor(group) is not None else len(group.prompt.input_ids)
            if batch.rows and batch.tokens + needs > self._prefill_tokens:
                break
            batch.tokens += needs
            batch.groups.append(group)
            while free and group.rows:
                batch.slots.append(free.popleft())
                batch.rows.append(group.rows.popleft())
                batch.group_of.append(len(batch.groups) - 1)
            if not group.rows:
                self._queue.popleft()
        self._running.extend([None] * (max(batch.slots, default=-1) + 1 - len(self._running)))
        return batch

    def _donor(self, group: _Group) -> int | None:
        """A slot that holds the keys and values of ``group``'s prompt."""
        if group.hidden is None:
            return None
        return next((i for i, s in enumerate(self._running) if s is not None and s.group is group), None)

    def _prefill(self, batch: _Admission) -> Tensor:
        """Bring every prompt of ``batch`` into the slots of its samples; hidden states ``[groups, H]``."""
        slots: list[list[int]] = [[] for _ in batch.groups]
        for slot, group in zip(batch.slots, batch.group_of, strict=True):
            slots[group].append(slot)
        donors = [self._donor(group) for group in batch.groups]
        fresh = [i for i, donor in enumerate(donors) if donor is None]
        if fresh:
            prompts = [batch.groups[i].prompt.input_ids for i in fresh]
            context = PrefillContext(self._cache, [len(p) for p in prompts], [slots[i][0] for i in fresh])
            ids = on_device(torch.tensor([token for p in prompts for token in p]), self._device)
            hidden = self._decoder.prefill(ids, context)
            for i, h in zip(fresh, hidden, strict=True):
                batch.groups[i].hidden = h
        source, target, longest = [], [], 0
        for group, own, donor in zip(batch.groups, slots, donors, strict=True):
            receivers = own if donor is not None else own[1:]
            source += [own[0] if donor is None else donor] * len(receivers)
            target += receivers
            longest = max(longest, len(group.prompt.input_ids))
        if target:
            self._cache.copy(source, target, longest)
        return torch.stack([g.hidden for g in batch.groups if g.hidden is not None])

    # Decoding

    def _decode(self) -> None:
        """Steps of all running slots, until one of them has ended."""
        sequences = [s for s in self._running if s is not None]
        made = [self._step - s.born + 1 for s in sequences]
        longest = max(len(s.group.prompt.input_ids) + n for s, n in zip(sequences, made, strict=True))
        left = self._budget - max(made)
        self._stepper.start(len(sequences), longest)
        # While the host looks the next steps run, and those of a sample that has ended are for nothing: one look may
        # be late where nobody waits for the slot.
        late = 1 if self._stepper.interval > 1 and not self._queue else 0
        unseen: deque[tuple[Tensor, Look]] = deque()
        while True:
            steps = min(self._stepper.interval, left)
            stops = self._is_stop[self._run(len(sequences), steps)]
            unseen.append((stops, Look(stops)))
            self._step += steps
            left -= steps
            if left == 0 or (len(unseen) > late and unseen[0][1].found()):
                self._end(torch.cat([stops for stops, _ in unseen]).tolist())
                return
            if len(unseen) > late:
                unseen.popleft()

    def _run(self, rows: int, steps: int) -> Tensor:
        """Some steps of the first slots, and their results stored; the tokens ``[steps, rows]``."""
        at = self._at[:rows]
        places = (at + torch.arange(steps, device=self._device)[:, None]).flatten()
        if self._uniforms is not None:
            self._stepper.uniforms[:steps, :rows] = self._uniforms.index_select(0, places).view(steps, rows)
        drawn = self._stepper.run(steps)
        self._store(places, drawn.tokens, drawn.logprobs, drawn.log_mass)
        at += steps
        return drawn.tokens

    def _end(self, stops: list[list[bool]]) -> None:
        """End the samples that drew a stop token in one of the last steps, and those whose budget is spent."""
        for slot, drawn in enumerate(zip(*stops, strict=True)):
            sequence = self._running[slot]
            assert sequence is not None
            made = self._step - sequence.born + 1
            if any(drawn):
                self._finish(slot, made - len(drawn) + drawn.index(True) + 1, True)
            elif made == self._budget:
                self._finish(slot, made, False)

    def _draw(self, logits: Tensor, at: Tensor) -> Sampled:
        """Sample, and store the results at flat places ``at`` ``[R]``."""
        uniform = None if self._uniforms is None else self._uniforms.index_select(0, at)
        drawn = self._stepper.sample(logits, uniform)
        self._store(at, *drawn)
        return drawn

    def _store(self, places: Tensor, tokens: Tensor, logprobs: Tensor, log_mass: Tensor | None) -> None:
        self._tokens.index_copy_(0, places, tokens.flatten())
        self._logprobs.index_copy_(0, places, logprobs.flatten())
        if log_mass is not None:
            self._log_mass.index_copy_(0, places, log_mass.flatten())

    def _of_slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Last token, its position, and where the next result goes, of each slot."""
        return self._stepper.tokens, self._stepper.positions, self._at

    def _finish(self, slot: int, length: int, stopped: bool) -> None:
        sequence = self._running[slot]
        assert sequence is not None
        self._lengths[sequence.row] = length
        self._reasons[sequence.row] = "stop" if stopped else "length"
        self._running[slot] = None

    def _compact(self) -> None:
        """Move the last running samples into the slots that nobody waits for."""
        count = sum(s is not None for s in self._running)
        target = [i for i in range(count) if self._running[i] is None]
        source = [i for i in range(count, len(self._running)) if self._running[i] is not None]
        if target:
            moved = [self._running[i] for i in source]
            longest = max(len(s.group.prompt.input_ids) + self._step - s.born for s in moved if s is not None)
            self._cache.copy(source, target, longest)
            at = on_device(torch.tensor([source, target]), self._device)
            for held in self._of_slots():
                held.index_copy_(0, at[1], held.index_select(0, at[0]))
            for slot, sequence in zip(target, moved, strict=True):
                self._running[slot] = sequence
        del self._running[count:]
