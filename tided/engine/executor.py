"""One step on one rank. Rank 0 and the others run this same code on the same messages (C1): nothing here depends
on a clock, a setting of the node or the rank's number, or decides by a value that another rank does not hold."""

import hashlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tided.control.messages import Admission, Change, Decode, Load, Prefill, Step
from tided.engine import drafting
from tided.engine.caching import Caching
from tided.engine.lane import Lane, Outcome
from tided.engine.logits import as_made, shaped
from tided.engine.ports import Residents
from tided.engine.sampling import drawing
from tided.engine.score import logprobs, scoring
from tided.engine.sight import Sight
from tided.errors import PairError
from tided.experts.fetch import UrgentReads
from tided.experts.tables import DemandTap
from tided.models.base import Model
from tided.models.copies import Coming
from tided.models.parallel import Alone, Group


class Executor:
    """`urgent` None: no request may wait for an expert. `caching` None: parked contexts stay in memory, and there is no
    prompt cache. `group`: the ranks that tell each other which expert they did not get; None: this one alone."""

    def __init__(
        self,
        model: Model,
        residents: Residents,
        tap: DemandTap,
        urgent: UrgentReads | None = None,
        caching: Caching | None = None,
        group: Group | None = None,
    ) -> None:
        self.model, self.residents, self.tap, self.urgent = model, residents, tap, urgent
        self.caching = caching or Caching(model)
        self._group = group or Alone()
        self.sight = Sight(model)
        self.lanes: dict[int, Lane] = {}
        self.seq = 0
        self.plan_version = 0
        self.parts_ms: dict[str, float] = {}  # of the last step, for people
        self.draft_s = 0.0  # of the last proposals; 0: nothing was to be proposed
        self._device = tap.counts.device
        self._masks: dict[int, bytes] = {}  # of the step in hand, by lane
        self._loads: dict[int, Load] = {}  # reads under way
        self._to_begin: list[Load] = []  # of the step in hand: behind the launch of its work
        self.beside: Callable[[], None] | None = None  # the same of who decides the steps; at the latest at its end
        self._history = hashlib.blake2b(digest_size=16)

    @torch.inference_mode()
    def execute(self, step: Step) -> Outcome:
        """Releases, lanes that leave the pool and come back, admissions, the change of the routable set, the work,
        snapshots. Raises PairError for a step that cannot follow the last one."""
        if step.seq != self.seq + 1:
            raise PairError(f"step {step.seq} came after step {self.seq}: a message was lost")
        for lane in step.release:
            self._release(lane)
        self._move_lanes(step)
        for admission in step.admit:
            self._admit(admission)
        marks = [time.perf_counter()]
        self._change(step)
        marks.append(time.perf_counter())
        outcome = Outcome()
        self.tap.begin_step()
        self._masks = {mask.lane: mask.bits for mask in step.masks}
        if isinstance(step.work, Prefill):
            self._prefill(step.work, outcome)
        elif isinstance(step.work, Decode):
            self._decode(step.work, outcome)
        self._group.check()
        self._settle(outcome)
        if step.save:
            self._arrived()
        for lane in step.save:
            if lane not in outcome.failed:
                self._save(lane)
        self._launched()
        marks.append(time.perf_counter())
        self.tap.add_up()
        self._history.update(f"{step.seq} {outcome.tokens};".encode())
        if step.digest_due:
            outcome.digest = self._digest()
        marks.append(time.perf_counter())
        spans = zip(("change", "work", "books"), marks, marks[1:], strict=False)
        self.parts_ms = {name: 1e3 * (end - begin) for name, begin, end in spans}
        self.seq = step.seq
        return outcome

    def check(self) -> None:
        """Raises PairError unless the books of expert memory, context pool and caches agree; for idle moments."""
        for check in self.checks():
            check()

    def checks(self) -> list[Callable[[], None]]:
        """`check` in pieces, of some milliseconds each."""
        return [self._check_contexts, self.residents.check_integrity, self._check_demand]

    def _check_contexts(self) -> None:
        self.model.check([lane.state for lane in self.lanes.values() if not lane.parked])
        self.caching.check([index for index, lane in self.lanes.items() if lane.parked])
        if self.sight.cut - self.lanes.keys():
            raise PairError("rows of images are kept for lanes that are not open")

    def _check_demand(self) -> None:
        self.tap.check(self.lanes)
        if self.urgent is not None:
            self.urgent.check()

    def _release(self, index: int) -> None:
        lane = self.lanes.pop(index)
        if lane.parked:
            self.caching.parked.drop(index)
        else:
            self.model.close_lane(lane.state)
        self.sight.forget(index)
        self.tap.forget(index)

    def _move_lanes(self, step: Step) -> None:
        """Copies are made here, between steps; files are written and read by threads."""
        for ticket in step.forget:
            self.caching.forget(ticket)
        for index in step.park:
            self.caching.park(self.lanes[index].state)
            self.lanes[index].parked = True
        for index in step.resume:
            self.lanes[index].state = self.caching.resume(index)
            self.lanes[index].parked = False
        for recall in step.recall:
            self.caching.recall(recall)

    def _admit(self, admission: Admission) -> None:
        if admission.lane in self.lanes:
            raise PairError(f"lane {admission.lane} was given away twice")
        if self.urgent is not None:
            self.urgent.open(admission.lane, admission.request.fidelity)
        index, request = admission.lane, admission.request
        if admission.restore is None:
            lane = Lane(request, self.model.open_lane(index))
            lane.drawn = request.prompt_ids[request.redrawn_from :] if request.redrawn_from else []
        else:
            state, logits = self.caching.restore(index, admission.restore)
            lane = Lane(request, state, logits=logits, masks={self.residents.mask_hash})
        self.lanes[index] = lane

    def _change(self, step: Step) -> None:
        """Reads are begun last: into slots that the rest of the change has freed. Where a step is launched at once,
        they begin behind that: this thread has time then."""
        change, generation = step.change, self.plan_version
        if change:
            with self.residents.at_once():
                generation += self._publish(change)
                self.residents.give_up(change.give_up)
                self._ended(change.give_up, read=False)
                if change.resize is not None:
                    self.residents.resize(change.resize.residents, change.resize.evict)
                    generation += bool(change.resize.evict)
                self.residents.adopt(change.adopt)
            self._to_begin = list(change.load)
            if not self._is_launched_at_once(step.work):
                self._begin_reads()
        self.plan_version = generation
        if self.plan_version != step.plan_version:
            raise PairError(f"plan {self.plan_version} is in place where step {step.seq} expects {step.plan_version}")

    def _is_launched_at_once(self, work: Prefill | Decode | None) -> bool:
        """Not where this thread computes, launches one operation after the other, or waits for experts in between."""
        if not isinstance(work, Decode) or (self.urgent is not None and self.urgent.may_wait(work.lanes)):
            return False
        return self.model.is_captured(len(work.lanes) + sum(work.drafts))

    def _launched(self) -> None:
        """The step's work is launched: while a device computes, this thread has time."""
        self._begin_reads()
        beside, self.beside = self.beside, None
        if beside is not None:
            beside()

    def _begin_reads(self) -> None:
        loads, self._to_begin = self._to_begin, []
        for load in loads:
            self.residents.read(load.ticket, load.pair, load.out, load.joins)
            self._loads[load.ticket] = load

    def _publish(self, change: Change) -> bool:
        """Whether it changed who is resident."""
        self.residents.publish(change.publish)
        self.residents.promote([(swap.out, swap.in_) for swap in change.promote])
        self.residents.withdraw(change.withdraw)
        loads = self._ended(change.publish, read=True)
        return bool(change.promote or change.adopt) or any(load.moves_residents for load in loads)

    def _ended(self, tickets: list[int], read: bool) -> list[Load]:
        """Requests that wait for experts learn from it too whether a record can be read."""
        loads = [self._loads.pop(ticket) for ticket in tickets]
        if self.urgent is not None:
            for load in loads:
                self.urgent.told(load.pair, read)
        return loads

    def _settle(self, outcome: Outcome) -> None:
        """Of a step that read experts before use, and every rank knows whether it did: a collective in which the ranks
        tell what they did not get. Lanes that were computed with it, on whichever rank, get no token on any."""
        if self.urgent is None or not self.urgent.asked:
            return
        bits = [float(missing << self._group.rank) for missing in self.urgent.missing_here()]
        total = self._group.sum(torch.tensor(bits, dtype=torch.float32, device=self._device))
        told = [int(ranks) for ranks in total.tolist()]
        self._group.check()  # a collective that waited in vain for a rank goes on with what is there
        outcome.failed = self.urgent.settle(told)
        outcome.tokens = [(lane, token) for lane, token in outcome.tokens if lane not in outcome.failed]

    def _arrived(self) -> None:
        """Raises PairError where the step's work went without a rank: nothing of it is to be kept."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._group.check()

    def _begin(self, lanes: list[int]) -> None:
        if self.urgent is not None:
            self.urgent.begin_step(lanes)

    def _prefill(self, work: Prefill, outcome: Outcome) -> None:
        lane = self.lanes[work.lane]
        prompt = lane.request.prompt_ids
        if lane.state.position != work.start and lane.scoring is None:
            raise PairError(f"lane {work.lane} stands at {lane.state.position}, its chunk begins at {work.start}")
        self._begin([work.lane])
        end = work.start + work.count
        lane.masks.add(self.residents.mask_hash)
        if work.count:
            last = end == len(prompt)
            if lane.request.scored:
                rows = self._score(lane, work, outcome)
                if rows is None:
                    return
                logits = self.model.logits(rows[-1:]) if last else None
            else:
                ids = torch.tensor(prompt[work.start : end], dtype=torch.int64)
                pictured = self.sight.of_chunk(work.lane, lane.request, work.start, end)
                logits = self.model.prefill(lane.state, ids, "last" if last else "none", pictured)
            lane.logits = logits if self.caching.plan.snapshots else None
        else:
            logits = None if lane.logits is None else lane.logits.to(self._device)
        if logits is not None:
            self.sight.drop(lane.request.request_id)
            self._draw(work.lane, logits, outcome)
            outcome.prompt_demand = self.tap.take(work.lane)
            self._propose([lane], work.propose, work.places)

    def _score(self, lane: Lane, work: Prefill, outcome: Outcome) -> Tensor | None:
        """A chunk of a scored prompt, or a part of it: its rows [T, hidden]; None: there is more to do."""
        if lane.scoring is None:
            pictured = self.sight.of_chunk(work.lane, lane.request, work.start, work.start + work.count)
            lane.scoring = scoring(self.model, lane, work.start, work.count, pictured)
        while True:
            try:
                next(lane.scoring)
            except StopIteration as end:
                rows: Tensor
                rows, outcome.scores, outcome.redrawn = end.value
                lane.scoring = None
                return rows
            if work.a_part:
                outcome.unfinished = True
                return None

    def _save(self, index: int) -> None:
        """The lane's context becomes a snapshot; a strict one, unless the routable set changed on the way."""
        lane, strict = self.lanes[index], self.caching.plan.strict
        if not strict or len(lane.masks) == 1:
            lane.keys = lane.keys or self.caching.chain(lane.request, min(lane.masks))
            self.caching.save(lane.state, lane.keys, lane.logits)
        lane.logits = None

    def _decode(self, work: Decode, outcome: Outcome) -> None:
        lanes = [self.lanes[index] for index in work.lanes]
        self._begin(work.lanes)
        depths = work.drafts or [0] * len(lanes)
        blocks = [drafting.block(lane.token, lane.drafts, depth) for lane, depth in zip(lanes, depths, strict=True)]
        counts = [len(block) for block in blocks]
        tokens = [token for block in blocks for token in block]
        logits = self.model.decode([lane.state for lane in lanes], self._ids(tokens), counts)
        drawing = self._drawing(work.lanes, logits, counts)  # of all lanes at once
        if not any(depths):
            self.tap.add_up()  # behind the draw; with drafts, who says which rows count comes later
        self._launched()
        drawn, first = drawing(), 0
        for index, block in zip(work.lanes, blocks, strict=True):
            if len(block) == 1:
                self._take(index, logits[first : first + 1], drawn[first], outcome)
            else:
                self._verify(index, block, drawn[first : first + len(block)], outcome)
            first += len(block)
        self._propose(lanes, work.propose, work.places)

    def _ids(self, tokens: list[int]) -> Tensor:
        """On the CPU, where a model looks at them too."""
        return torch.tensor(tokens, dtype=torch.int64)

    def _verify(self, index: int, block: list[int], drawn: list[int], outcome: Outcome) -> None:
        """`drawn`: by the rows of the lane's newest token and the drafts behind it. Drafts that are not what is drawn,
        and all behind them, never came."""
        lane = self.lanes[index]
        tokens = drafting.accepted(drawn, block[1:], lane.request.stop_ids)
        self.model.keep(lane.state, len(tokens))
        self.tap.keep(index, len(tokens))
        lane.token = tokens[-1]
        outcome.tokens += [(index, token) for token in tokens]

    def _propose(self, lanes: list[Lane], wanted: bool, places: int) -> None:
        """Of the lanes whose draws may be foreseen, and no more than their answers may still have."""
        began_s = time.perf_counter()
        for lane in lanes:
            lane.drafts, lane.sure = [], []
        open_ = [lane for lane in lanes if lane.draft_room] if wanted else []
        if open_:
            choose = drafting.Chooser(
                [lane.request.sampling for lane in open_], [lane.state.position + 1 for lane in open_]
            )
            states, anchors = [lane.state for lane in open_], self._ids([lane.token for lane in open_])
            few = (places,) if places else ()
            draft = self.model.propose(states, anchors.to(self._device), choose, *few)
            choose.check()
            all_ids, all_sure = (part.tolist() for part in Coming(draft.ids, draft.confidence).here())
            for lane, ids, sure in zip(open_, all_ids, all_sure, strict=True):
                lane.drafts, lane.sure = ids[: lane.draft_room], sure[: lane.draft_room]
        self.draft_s = time.perf_counter() - began_s if open_ else 0.0

    def _draw(self, index: int, logits: Tensor, outcome: Outcome) -> None:
        """logits [1, vocab]"""
        (token,) = self._drawing([index], logits, [1])()
        self._take(index, logits, token, outcome)

    def _take(self, index: int, logits: Tensor, token: int, outcome: Outcome) -> None:
        """logits [1, vocab], as the model made them."""
        lane = self.lanes[index]
        lane.token = token
        if lane.request.sampling.penalised:
            lane.drawn.append(token)
        if lane.request.logprobs is not None:
            told = logprobs(logits, [token], lane.request.logprobs)
            outcome.logprobs.setdefault(index, []).extend(told)
        outcome.tokens.append((index, token))

    def _drawing(self, indices: list[int], logits: Tensor, counts: list[int]) -> Callable[[], list[int]]:
        """logits [R, vocab], so many rows of each lane, whose contexts have them: a device begins to draw, and the
        tokens [R] are there when they are asked for."""
        rows = [
            (lane.request.sampling, lane.state.position - count + 1 + row)
            for lane, count in zip([self.lanes[index] for index in indices], counts, strict=True)
            for row in range(count)
        ]
        return drawing(self._shaped(indices, logits, counts), rows)

    def _shaped(self, indices: list[int], logits: Tensor, counts: list[int]) -> Tensor:
        """logits [R, vocab], not changed -> [R, vocab]; the same tensor where no lane wants them otherwise. A lane of
        several rows does not (`Request.may_draft`)."""
        lanes = [self.lanes[index] for index in indices]
        wishes = [
            (asked := lane.asked, lane.state.position - len(asked.prompt_ids), self._masks.get(index))
            for index, lane in zip(indices, lanes, strict=True)
        ]
        if all(as_made(*wish) for wish in wishes):
            return logits
        parts = [
            rows if as_made(asked, so_far, mask) else shaped(rows.squeeze(0), asked, lane.drawn, so_far, mask)[None]
            for rows, lane, (asked, so_far, mask) in zip(torch.split(logits, counts), lanes, wishes, strict=True)
        ]
        return torch.cat(parts)

    def _digest(self) -> str:
        """Every token so far, the routable set and its slots as the tables hold them, reads under way, what was read
        before use, and what the router chose in the open requests. Only integers are compared: their sums do not depend
        on the order a device adds them in."""
        now = self._history.copy()
        now.update(self.residents.state().encode())
        if self.urgent is not None:
            now.update(self.urgent.state().encode())
        now.update(self.tap.counts.to(torch.int32).cpu().numpy().tobytes())
        now.update(self.tap.totals[:, [0, 1, 4, 5]].to(torch.int64).cpu().numpy().tobytes())
        return now.hexdigest()
